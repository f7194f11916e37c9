"""Stochastic attention where people train: checkpointing, autocast, Trainer, PEFT, generate, and `bf.fit`."""

import pytest
import torch
from torch import nn

import bayesformer as bf
from bayesformer.attention import Weibull, attention_mode, families, install, uninstall
from tests.attention_models import B, T, V, bert_config, gpt2_config, llama_config, padding

transformers = pytest.importorskip("transformers")
QUIET = {"save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": []}


def classifier(**options):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(bert_config(num_labels=3, **options))


def gradients(model, ids, mask):
    model.zero_grad()
    torch.manual_seed(1)
    logits = model(input_ids=ids, attention_mask=mask).logits
    kl = bf.kl_divergence(model)
    terms = families(model)[0].forward_pass.kl_terms
    count = len(terms)
    (logits.square().sum() + kl.sum()).backward()
    # What a checkpoint computes anew is not recorded again.
    assert families(model)[0].forward_pass.kl_terms is terms
    assert len(terms) == count
    return kl.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_checkpointing_keeps_the_kl_and_its_gradient():
    ids, mask = torch.randint(1, V, (B, T)), padding()
    model = install(classifier(), "weibull", prior="contextual").train()
    kl, expected = gradients(model, ids, mask)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    same, found = gradients(model, ids, mask)
    torch.testing.assert_close(same, kl)
    assert list(found) == list(expected)
    assert any("contextual" in name for name in found)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], msg=name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(RuntimeError, match="Checkpointing must have use_reentrant=False; got the re-entrant one"):
        model(input_ids=ids, attention_mask=mask)
    model.eval()(input_ids=ids, attention_mask=mask)  # an error leaves nothing behind
    assert families(model)[0].forward_pass.outermost is None


def test_autocast():
    model = install(classifier(num_hidden_layers=1), Weibull()).train()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randint(1, V, (B, 3))).logits
    kl = bf.kl_divergence(model)
    assert logits.dtype == torch.bfloat16
    assert kl.dtype == torch.float32
    (logits.float().sum() + kl.sum()).backward()
    assert torch.isfinite(model.bert.encoder.layer[0].attention.self.query.weight.grad).all()


def test_generate_with_a_cache():
    for kind, config in (("GPT2LMHeadModel", gpt2_config()), ("LlamaForCausalLM", llama_config())):
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config).eval()
        ids, mask = torch.randint(3, V, (B, T)), padding(right=False)
        options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, **options)
        install(model, Weibull(k=1.0))
        assert torch.equal(model.generate(ids, **options), expected)
        with attention_mode(model, "draw"):
            drawn = model.generate(ids, **options)
        assert drawn.shape[0] == B
        assert drawn.shape[1] > T
        uninstall(model)
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("order", ["peft first", "install first"])
def test_peft(order):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    ids, mask, model = torch.randint(1, V, (B, T)), padding(), classifier()
    if order == "peft first":
        model = install(peft.get_peft_model(model, config), "weibull", prior="contextual").train()
    else:
        model = peft.get_peft_model(install(model, "weibull", prior="contextual"), config).train()
    for _ in range(2):  # a new pass starts anew
        kl, grads = gradients(model, ids, mask)
        terms = families(model)[0].forward_pass.kl_terms
        assert len(terms) == len(families(model)) == 2
        torch.testing.assert_close(kl, sum(terms).detach())
    assert all(grad.abs().sum() > 0 for name, grad in grads.items() if "lora" in name and "layer.0" in name)
    assert any("contextual" in name for name in grads) == (order == "peft first")
    model.eval()
    drawless = model(input_ids=ids, attention_mask=mask).logits
    uninstall(model)
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, drawless, rtol=1e-5, atol=1e-5)


def test_peft_trains_and_saves_the_prior_with_its_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["contextual"])
    ids, mask = torch.randint(1, V, (B, T)), padding()

    def installed():
        torch.manual_seed(0)
        return install(classifier(), "weibull", prior="contextual")

    model = peft.get_peft_model(installed(), config).train()
    _, grads = gradients(model, ids, mask)
    assert any("contextual" in name and grad.abs().sum() > 0 for name, grad in grads.items())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p) * p.requires_grad)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(installed(), tmp_path).train()
    found = []
    for network in (model, loaded):
        torch.manual_seed(1)
        found.append((network(input_ids=ids, attention_mask=mask).logits, bf.kl_divergence(network)))
    torch.testing.assert_close(found[0], found[1])


def test_a_trainer_needs_one_line(tmp_path):
    pytest.importorskip("accelerate")

    class Bayesian(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = loss + bf.kl_divergence(model).mean()
            return (loss, outputs) if return_outputs else loss

    model = install(classifier(), "weibull", prior="contextual")
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "contextual" in name}
    rows = [{"input_ids": torch.randint(1, V, (T,)), "labels": i % 3} for i in range(4)]
    settings = {"max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path), **settings, **QUIET)
    result = Bayesian(model=model, args=arguments, train_dataset=rows).train()
    assert result.global_step == 2
    assert all(not torch.equal(value, model.get_parameter(name)) for name, value in before.items() if "weight" in name)


def test_fit_takes_a_model_of_transformers(tmp_path):
    model, ids = classifier(num_hidden_layers=1), torch.randint(1, V, (8, T))
    data = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}
    method = bf.Attention("weibull", spread=2.0, prior="contextual", draws=3)
    training = bf.Training(epochs=1, batch_size=4)
    posterior = bf.fit(model, data, likelihood="categorical", method=method, training=training)
    inputs = {key: value for key, value in data.items() if key != "labels"}
    assert posterior.outputs(inputs).values.shape == (3, 8, 3)
    values = posterior.outputs(inputs).values
    assert not torch.equal(values[0], values[1])
    assert not families(model)  # the model given is not changed
    assert model.config._attn_implementation != "bayesformer"
    posterior.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, model)
    assert torch.equal(loaded.outputs(inputs).values, posterior.outputs(inputs).values)


def test_fit_takes_torch_encoders():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)
            self.out = nn.Linear(8, 2)

        def forward(self, x):
            return self.out(self.encoder(x).mean(1))

    x = torch.randn(8, T, 8)
    method, training = bf.Attention("dirichlet", draws=3), bf.Training(epochs=1, batch_size=4)
    posterior = bf.fit(Mean(), (x, x[:, 0, 0].gt(0).long()), likelihood="categorical", method=method, training=training)
    values = posterior.outputs(x).values
    assert not torch.equal(values[0], values[1])
