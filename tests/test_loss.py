"""The public loss against the objective that fit ascends, and against transformers' own losses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesformer as bf
from bayesformer.attention import attention_kl, install
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA
from bayesformer.model.shell import Shell
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.models.transformer import Encoder, Regressor, Tagger
from bayesformer.priors.prior import as_prior
from bayesformer.train.objective import Constant, Objective
from bayesformer.train.vector_prior import NamedPrior
from tests.attention_models import B, T, V, bert_config, gpt2_config, padding

transformers = pytest.importorskip("transformers")
IDS = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(0))


def bert_tokens():
    return transformers.BertForTokenClassification(bert_config(num_labels=3))


def bert_sequence():
    return transformers.BertForSequenceClassification(bert_config(num_labels=3))


def gpt2():
    return transformers.GPT2LMHeadModel(gpt2_config())


def ignoring(labels):
    """The second example has two labels less."""
    return labels.masked_fill(padding() == 0, -100)


CASES = {
    "token classification": (bert_tokens, ignoring(IDS % 3), bf.Categorical()),
    "sequence classification": (bert_sequence, IDS[:, 0] % 3, bf.Categorical()),
    "language model": (gpt2, ignoring(IDS), bf.NextToken()),
}


def installed(build):
    torch.manual_seed(0)
    return install(build(), "weibull", prior="contextual", spread=3.0).train()


@pytest.mark.parametrize("name", CASES)
def test_per_token_is_the_loss_of_transformers_plus_the_kl_over_tokens(name):
    build, labels, likelihood = CASES[name]
    model, inputs = installed(build), {"input_ids": IDS, "attention_mask": padding()}
    torch.manual_seed(1)
    ours = bf.loss(model, inputs, labels, likelihood=likelihood, num_data=50, per="token")
    torch.manual_seed(1)
    theirs = model(**inputs, labels=labels).loss
    tokens = {"token classification": 8, "sequence classification": 2, "language model": 6}[name]
    assert attention_kl(model).sum() > 0.1
    torch.testing.assert_close(ours, theirs + attention_kl(model).sum() / tokens)
    torch.manual_seed(1)
    per_example = bf.loss(model, inputs, labels, likelihood=likelihood, num_data=50)
    torch.testing.assert_close(per_example, ours * tokens / B)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("prior", [None, "normal(0, 0.5)"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_minus_the_objective_of_fit_with_its_gradient(name, prior, temperature):
    build, labels, likelihood = CASES[name]
    model, inputs = installed(build), {"input_ids": IDS, "attention_mask": padding()}
    torch.manual_seed(1)
    found = bf.loss(model, inputs, labels, likelihood=likelihood, num_data=50, prior=prior, temperature=temperature)
    found.backward()
    space = Space.of(model)
    shell: Shell = Skeleton(model, space).shell()
    shell.module.train()
    law = None if prior is None else NamedPrior(as_prior(prior), space)
    objective = Objective(shell, likelihood, 50, law, kl_weight=Constant(temperature))
    torch.manual_seed(1)
    value, _, grads = objective.value_and_grad({THETA: shell.theta.clone()}, Batch(inputs, labels))
    torch.testing.assert_close(found.detach(), -value)
    weights = dict(model.named_parameters())
    for key, grad in space.views(grads[THETA]).items():
        own = weights[key].grad
        torch.testing.assert_close(torch.zeros_like(grad) if own is None else own, -grad, rtol=1e-4, atol=1e-5)


def test_random_weights_are_shared_by_all_data():
    torch.manual_seed(0)
    model = bf.convert(Regressor(Encoder(dim=8, heads=2)), "gaussian", rho=-2.0)
    x, y = torch.randn(4, 6, 1), torch.randn(4, 6, 1)
    found = []
    for num_data in (10, 1000):
        torch.manual_seed(1)
        found.append(bf.loss(model, x, y, likelihood="gaussian", num_data=num_data))
    torch.manual_seed(1)
    log_likelihood = bf.Gaussian().log_prob(model(x), y).mean()
    kl = bf.kl_divergence(model)
    torch.testing.assert_close(found[0], -log_likelihood + kl / 10)
    torch.testing.assert_close(found[1], -log_likelihood + kl / 1000)
    torch.manual_seed(1)
    per_token = bf.loss(model, x, y, likelihood="gaussian", num_data=10, per="token")
    torch.testing.assert_close(per_token, found[0] / 6)


def test_a_plain_model_has_a_plain_loss():
    torch.manual_seed(0)
    model, mask = Tagger(Encoder(dim=8, heads=2), V, 3), padding().bool()
    labels = IDS % 3
    expected = F.cross_entropy(model(IDS).flatten(0, 1), labels.flatten(), reduction="none").view(B, T)
    found = bf.loss(model, IDS, labels, likelihood="categorical", num_data=7, mask=mask)
    torch.testing.assert_close(found, expected[mask].sum() / B)
    found = bf.loss(model, IDS, labels, likelihood="categorical", num_data=7, mask=mask, per="token")
    torch.testing.assert_close(found, expected[mask].mean())


def test_a_mode_is_left_as_it_is():
    model = installed(bert_sequence).eval()
    labels = IDS[:, 0] % 3
    found = [bf.loss(model, IDS, labels, likelihood="categorical", num_data=9) for _ in range(2)]
    assert torch.equal(*found)  # mean attention, whose KL is 0
    torch.testing.assert_close(found[0], model(IDS, labels=labels).loss)
    assert not model.training


def test_a_loop_of_ones_own_finds_what_fit_finds():
    """The same objective, the same Adam: one epoch in one batch from the same weights, without noise."""
    torch.manual_seed(0)
    model = Tagger(Encoder(dim=8, heads=2), V, 3)
    data = (IDS, IDS % 3)
    training = bf.Training(epochs=3, batch_size=B, lr=0.01, schedule="constant", warmup=1, clip=1e9)
    posterior = bf.fit(model, data, likelihood="categorical", method=bf.Map(prior="normal(0, 1)"), training=training)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        bf.loss(model, *data, likelihood="categorical", num_data=B, prior="normal(0, 1)").backward()
        optimizer.step()
    for name, value in posterior.sample(1).items():
        if name.endswith("key.bias"):
            continue  # softmax does not see it: its gradient is rounding, which Adam makes as large as any other
        torch.testing.assert_close(model.get_parameter(name).detach(), value[0], rtol=1e-4, atol=1e-5)


def test_a_trainer_of_transformers_trains_by_it(tmp_path):
    pytest.importorskip("accelerate")
    losses = []

    class BayesianTrainer(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.model_accepts_loss_kwargs = False  # this loss is a mean of its batch, not of accumulated ones
            labels = inputs.pop("labels")
            count = len(self.train_dataset)
            found = bf.loss(model, inputs, labels, likelihood=bf.NextToken(), num_data=count, per="token")
            with torch.no_grad():
                kl = attention_kl(model).sum() / (labels[:, 1:] != -100).sum()
            losses.append((found.item(), kl.item()))
            return found

    model = installed(gpt2)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, V, (8, T))]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        report_to=[],
    )
    trainer = BayesianTrainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    assert len(losses) == 8
    assert all(0 < kl < total for total, kl in losses)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    for step, value in enumerate(logged):  # accumulated batches are averaged
        mean = (losses[2 * step][0] + losses[2 * step + 1][0]) / 2
        assert value == pytest.approx(mean, abs=2e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": 0}, "num_data must be the number of training examples, at least 1; got 0"),
        ({"temperature": -1.0}, "temperature must be at least 0; got -1.0"),
        ({"per": "sentence"}, "per 'sentence'"),
        ({"likelihood": "poison"}, "poisson"),
    ],
)
def test_errors_name_argument_rule_and_value(options, message):
    model = Tagger(Encoder(dim=8, heads=2), V, 3)
    given = {"likelihood": "categorical", "num_data": 5, **options}
    with pytest.raises(ValueError, match=message):
        bf.loss(model, IDS, IDS % 3, **given)


def test_labels_must_line_up_and_some_must_count():
    with pytest.raises(ValueError, match=r"causal language model \(GPT2LMHeadModel\) line up; got 'categorical'"):
        bf.loss(gpt2(), IDS, IDS, likelihood="categorical", num_data=5)
    nothing = torch.full((B, T), -100)
    with pytest.raises(ValueError, match="at least one of the targets must count; got 10 of which none does"):
        bf.loss(bert_tokens(), IDS, nothing, likelihood="categorical", num_data=5, per="token")
    linear, labels = nn.Linear(2, 2), torch.zeros(3, dtype=torch.long)
    expected = F.cross_entropy(linear(torch.ones(3, 2)), labels)
    torch.testing.assert_close(
        bf.loss(linear, torch.ones(3, 2), labels, likelihood="categorical", num_data=3), expected
    )


def both_random():
    torch.manual_seed(0)
    plain = Tagger(Encoder(dim=8, heads=2), V, 3)
    return install(bf.convert(plain, "gaussian", rho=-2.0), "weibull", prior="contextual", spread=3.0).train()


def converted():
    torch.manual_seed(0)
    return bf.convert(Tagger(Encoder(dim=8, heads=2), V, 3), "gaussian", rho=-2.0).train()


def with_concrete():
    torch.manual_seed(0)
    return bf.convert_concrete(Tagger(Encoder(dim=8, heads=2), V, 3)).train()


RANDOM = {"attention": lambda: installed(bert_tokens), "weights": converted, "concrete": with_concrete}


@pytest.mark.parametrize("prior", [None, "normal(0, 0.5)"])
@pytest.mark.parametrize("build", [*RANDOM.values(), both_random], ids=[*RANDOM, "both"])
def test_the_log_joint_is_minus_the_loss_with_the_kl_of_what_is_random(build, prior):
    model, labels = build(), IDS % 3
    joint = bf.log_joint(model, "categorical", prior, 5)
    params = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.manual_seed(1)
    value, _ = joint(params, Batch(IDS, labels))
    torch.manual_seed(1)
    expected = bf.loss(model, IDS, labels, likelihood="categorical", num_data=5, prior=prior)
    torch.testing.assert_close(value, -expected.detach())
    assert bf.kl_divergence(model, num_data=5).abs().mean() > 0.01  # else the equality would not see it
    torch.manual_seed(1)
    grads, _ = torch.func.grad(joint, has_aux=True)(params, Batch(IDS, labels))
    expected.backward()
    for name, weight in model.named_parameters():
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        torch.testing.assert_close(grads[name], -own, rtol=1e-4, atol=1e-5)


def test_the_log_joint_takes_the_kl_at_the_weights_it_is_given():
    model, labels = converted(), IDS % 3
    joint = bf.log_joint(model, "categorical", None, 5)
    moved = {name: weight.detach() + 0.3 for name, weight in model.named_parameters()}
    torch.manual_seed(1)
    value, _ = joint(moved, Batch(IDS, labels))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(moved[name])
    torch.manual_seed(1)
    torch.testing.assert_close(value, -bf.loss(model, IDS, labels, likelihood="categorical", num_data=5).detach())
