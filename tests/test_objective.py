"""The one objective: value and gradient against the written-out formula, for everything that enters it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

import bayesformer as bf
from bayesformer.attention import attention_kl, install
from bayesformer.core.types import Batch
from bayesformer.core.vectors import THETA, value_and_grad
from bayesformer.data import as_batches
from bayesformer.laws import Dense, Deviations, Diagonal, GaussianLaw, Kronecker, LowRank
from bayesformer.layers import Variational, kl_divergence
from bayesformer.likelihoods import Categorical
from bayesformer.model.calling import apply
from bayesformer.model.randomness import pass_noise
from bayesformer.model.skeleton import Skeleton
from bayesformer.model.space import Space
from bayesformer.models.tabular import FeatureTransformer
from bayesformer.models.transformer import Encoder
from bayesformer.priors.prior import as_prior
from bayesformer.train.objective import Constant, Objective
from bayesformer.train.vector_prior import GaussianPrior, NamedPrior
from tests.nets import Keyword, Mlp, Positional, Tied

N = 40


def objective(model, likelihood=None, prior=None, num_data=N, train=False, **options):
    """On a fresh shell of a model; `prior` is a law such as "normal(0, 0.5)"."""
    shell = Skeleton(model, Space.of(model)).shell()
    shell.module.train(train)
    named = NamedPrior(as_prior(prior), shell.space) if isinstance(prior, str | dict) else prior
    return Objective(shell, likelihood or Categorical(), num_data, named, **options)


def seeded(seed=3):
    """Noise that is the same every time it is asked for."""
    return pass_noise(torch.Generator().manual_seed(seed))


def case(name):
    """(model, batch) of every kind of module and input, without noise."""
    if name in {"plain", "frozen"}:
        model = Mlp()
        model.net[0].requires_grad_(name == "plain")
        return model, Batch(torch.randn(6, 3), torch.randint(2, (6,)))
    if name == "positional":
        return Positional(), Batch((torch.randn(6, 2), torch.randn(6, 4)), torch.randint(3, (6,)))
    if name == "keyword":
        inputs = {"input_ids": torch.randint(7, (6, 5)), "attention_mask": torch.ones(6, 5)}
        return Keyword(), Batch(inputs, torch.randint(3, (6,)))
    if name in {"tied", "masked"}:
        mask = torch.rand(6, 4) > 0.4 if name == "masked" else None
        return Tied(), Batch(torch.randint(5, (6, 4)), torch.randint(5, (6, 4)), mask)
    return hugging_face(name)


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(2, 30, (4, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    small = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "bert":
        config = transformers.BertConfig(**small, intermediate_size=32, num_labels=3, max_position_embeddings=16)
        return transformers.BertForSequenceClassification(config).eval(), Batch(inputs, torch.randint(3, (4,)))
    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)  # tied embeddings
    return transformers.GPT2LMHeadModel(config).eval(), Batch(inputs, ids)


CASES = ["plain", "positional", "keyword", "tied", "masked", "frozen", "bert", "gpt2"]


def naive(model, batch, sd=0.5):
    """Mean over examples of the log-likelihood summed over counted positions, plus the log prior over N."""
    logits = apply(model, batch.inputs)
    losses = F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), reduction="none")
    losses = losses.view(len(batch.targets), -1)
    if batch.mask is not None:
        losses = losses * batch.mask.view(len(batch.targets), -1)
    prior = sum(Normal(0, sd).log_prob(p).sum() for p in model.parameters() if p.requires_grad)
    return -losses.sum(1).mean() + prior / N, logits


def gradient_of(model, value):
    """(P,): the ordinary gradient with respect to what requires one."""
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name):
    model, batch = case(name)
    found = objective(model, prior="normal(0, 0.5)")
    value, outputs, grads = found.value_and_grad({THETA: found.shell.theta}, batch)
    twin = copy.deepcopy(model).eval()
    expected, logits = naive(twin, batch)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(outputs, logits.detach())
    torch.testing.assert_close(grads[THETA], gradient_of(twin, expected), atol=1e-6, rtol=1e-4)
    assert set(found.named) == {"log_likelihood", "log_prior"}
    torch.testing.assert_close(sum(found.named.values()), value)


@pytest.mark.parametrize("name", CASES)
def test_pure_and_fast_gradients_agree_at_other_weights(name):
    model, batch = case(name)
    found = objective(model, prior="normal(0, 0.5)")
    theta = found.shell.theta + 0.1 * torch.randn_like(found.shell.theta)
    value, outputs, grads = found.value_and_grad({THETA: theta}, batch)
    pure = torch.func.grad_and_value(found, has_aux=True)({THETA: theta}, batch)
    torch.testing.assert_close(value, pure[1][0])
    torch.testing.assert_close(outputs, pure[1][1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads[THETA], pure[0][THETA], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_by_name_and_by_vector_are_one_function(name):
    model, batch = case(name)
    found = objective(model, prior="normal(0, 0.5)")
    theta = found.shell.theta + 0.1 * torch.randn_like(found.shell.theta)
    joint = bf.log_joint(model.eval(), "categorical", as_prior("normal(0, 0.5)"), N)
    value, outputs, grads = value_and_grad(joint)(found.shell.space.views(theta), batch)
    expected = found.value_and_grad({THETA: theta}, batch)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(outputs, expected[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.shell.space.pack(grads), expected[2][THETA], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_members_in_lockstep_get_what_each_gets_alone(name):
    """Float32; sums in another order: values to 1e-6 of themselves, gradients to 1e-5 plus a thousandth."""
    model, batch = case(name)
    found = objective(model, prior="normal(0, 0.5)")
    theta = found.shell.theta + 0.1 * torch.randn(3, len(found.shell.theta))
    order = torch.stack([torch.randperm(len(batch.targets)) for _ in range(3)])
    inputs = batch.inputs
    if name in {"bert", "gpt2"}:  # Hugging Face looks into a padding mask, which vmap cannot
        inputs = {"input_ids": inputs["input_ids"]}

    def pick(index):
        chosen = torch.utils._pytree.tree_map(lambda x: x[index], inputs)
        return Batch(chosen, batch.targets[index], None if batch.mask is None else batch.mask[index])

    together = found.value_and_grad({THETA: theta}, pick(order))
    for row in range(3):
        value, outputs, grads = found.value_and_grad({THETA: theta[row]}, pick(order[row]))
        torch.testing.assert_close(together[0][row], value, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(together[1][row], outputs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(together[2][THETA][row], grads[THETA], atol=1e-5, rtol=1e-3)


def test_a_weight_that_no_output_depends_on_has_the_gradient_of_its_prior():
    class Spare(Mlp):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    found = objective(Spare(), prior="normal(0, 0.5)")
    theta, batch = torch.randn(2, len(found.shell.theta)), Batch(torch.randn(2, 6, 3), torch.randint(2, (2, 6)))
    together = found.value_and_grad({THETA: theta}, batch)[2][THETA]
    for row in range(2):
        own = Batch(batch.inputs[row], batch.targets[row])
        alone = found.value_and_grad({THETA: theta[row]}, own)[2][THETA]
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-3)
        spare = found.shell.space.views(alone)["spare.weight"]
        torch.testing.assert_close(spare, -found.shell.space.views(theta[row])["spare.weight"] / 0.25 / N)


# --- what is random in a network ------------------------------------------------------------------------------------


def variational(**options):
    return Variational(Mlp().double(), prior=as_prior("normal(0, 0.7)"), rho=-1.0, **options)


def attentive():
    torch.manual_seed(5)
    model = FeatureTransformer(Encoder(dim=8, depth=2, heads=2, max_length=4), features=3).double()
    return install(model, "weibull", prior="contextual")


RANDOM = {
    "mean field": variational,
    "mean field, drawn weights": lambda: variational(local=False),
    "attention": attentive,
    "both": lambda: Variational(attentive(), subset="*encoder*", prior=as_prior("normal(0, 0.7)"), rho=-2.0),
    "both, drawn weights": lambda: Variational(
        attentive(), subset="*encoder*", prior=as_prior("normal(0, 0.7)"), rho=-2.0, local=False
    ),
}
POINTS = Batch(torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 2)


def closed_form_kl(model):
    """KL of the random weights from N(0, 0.7²), () or 0, by torch.distributions."""
    if not isinstance(model, Variational):
        return torch.zeros((), dtype=torch.float64)
    scales, own = model.scales(), dict(model.point().named_parameters())
    return sum(
        torch.distributions.kl_divergence(Normal(own[name], scale), Normal(0.0, 0.7)).sum()
        for name, scale in scales.items()
    )


@pytest.mark.parametrize("kappa", [1.0, 0.3])
@pytest.mark.parametrize("name", RANDOM)
def test_random_parts_enter_with_their_own_scale(name, kappa):
    """KL of weights over N, KL of attention per example and not over N; both by κ."""
    model = RANDOM[name]().train()
    found = objective(model, train=True, kl_weight=Constant(kappa))
    with seeded():
        value, outputs, _ = found.value_and_grad({THETA: found.shell.theta}, POINTS)
    with seeded(), torch.no_grad():
        logits = apply(model, POINTS.inputs)
        weights = closed_form_kl(model)
        attention = attention_kl(model) if "mean" not in name else torch.zeros(6, dtype=torch.float64)
    assert (attention > 0).all() or "mean" in name
    likelihood = -F.cross_entropy(logits, POINTS.targets)
    torch.testing.assert_close(outputs, logits)
    torch.testing.assert_close(value, likelihood - kappa * (weights / N + attention.mean()))
    torch.testing.assert_close(found.named["kl"], kappa * (weights / N + attention.mean()))


@pytest.mark.parametrize("name", RANDOM)
def test_gradients_of_random_parts_equal_finite_differences(name):
    found = objective(RANDOM[name](), prior="student_t(3, 0, 1)", train=True)
    theta = found.shell.theta.clone()

    def value(at):
        with seeded():
            return found({THETA: at}, POINTS)[0].item()

    with seeded():
        fast = found.value_and_grad({THETA: theta}, POINTS)
    assert fast[0].item() == pytest.approx(value(theta), abs=1e-12)
    grad, h = fast[2][THETA].clone(), 1e-5
    for i in torch.randperm(len(theta))[:25].tolist():
        step = torch.zeros_like(theta)
        step[i] = h
        difference = (value(theta + step) - value(theta - step)) / (2 * h)
        assert difference == pytest.approx(grad[i].item(), abs=2e-7, rel=2e-5)


def test_gradient_without_noise_equals_finite_differences():
    model, batch = Mlp().double(), Batch(torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,)))
    found = objective(model, prior="student_t(3, 0, 1)")
    theta = found.shell.theta.clone()
    grad, h = found.value_and_grad({THETA: theta}, batch)[2][THETA].clone(), 1e-6
    for i in range(0, len(theta), 5):
        step = torch.zeros_like(theta)
        step[i] = h
        difference = (found({THETA: theta + step}, batch)[0] - found({THETA: theta - step}, batch)[0]) / (2 * h)
        assert difference.item() == pytest.approx(grad[i].item(), abs=1e-8)


@pytest.mark.parametrize("name", RANDOM)
def test_several_samples_are_the_average_of_single_ones(name):
    model = RANDOM[name]()
    many, one = objective(model, train=True, samples=3), objective(model, train=True)
    with seeded():
        value, _, grads = many.value_and_grad({THETA: many.shell.theta}, POINTS)
    with seeded():
        pure = many({THETA: many.shell.theta}, POINTS)[0]
    with seeded():
        singles = [one.value_and_grad({THETA: one.shell.theta}, POINTS) for _ in range(1)]
        parts = [(v.clone(), g[THETA].clone(), dict(one.named)) for v, _, g in singles]
        for _ in range(2):
            v, _, g = one.value_and_grad({THETA: one.shell.theta}, POINTS)
            parts.append((v.clone(), g[THETA].clone(), dict(one.named)))
    assert len({p[0].item() for p in parts}) == 3
    torch.testing.assert_close(value, torch.stack([p[0] for p in parts]).mean())
    torch.testing.assert_close(pure, value)
    torch.testing.assert_close(grads[THETA], torch.stack([p[1] for p in parts]).mean(0))
    for key in ("log_likelihood", "kl"):
        torch.testing.assert_close(many.named[key], torch.stack([p[2][key] for p in parts]).mean())


class Counting:
    """κ that grows by .1 with every step that a buffer counts."""

    def __call__(self, module):
        steps = module.get_buffer("steps")
        weight = 0.1 * steps
        steps += 1
        return weight.clone()


def test_kappa_is_asked_once_per_step_and_a_pure_call_counts_none():
    model = variational()
    model.register_buffer("steps", torch.tensor(2.0, dtype=torch.float64))
    found = objective(model, train=True, kl_weight=Counting(), samples=2, num_data=12)
    theta = {THETA: found.shell.theta.clone()}
    with seeded():
        pure = found(theta, POINTS)[0]
    assert found.shell.buffers["steps"] == 2
    with seeded():
        value = found.value_and_grad(theta, POINTS)[0]
    torch.testing.assert_close(value, pure)
    assert found.shell.buffers["steps"] == 3
    found.over(theta, [POINTS, POINTS])
    assert found.shell.buffers["steps"] == 4


# --- many batches as one --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(10, 10, 10, 10), (1, 25, 14), (40,)])
def test_many_batches_are_one_evaluation(sizes):
    model = Tied().double()
    inputs, targets = torch.randint(5, (N, 4)), torch.randint(5, (N, 4))
    mask = torch.rand(N, 4) > 0.3
    found = objective(model, prior="normal(0, 0.5)")
    theta = {THETA: found.shell.theta.clone()}
    whole = found.value_and_grad(theta, Batch(inputs, targets, mask))
    expected, grad, named = whole[0], whole[2][THETA].clone(), dict(found.named)
    parts = zip(inputs.split(sizes), targets.split(sizes), mask.split(sizes), strict=True)
    value, grads = found.over(theta, (Batch(*part) for part in parts))
    torch.testing.assert_close(value, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grads[THETA], grad, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(found.named, named)


def test_batches_of_a_part_of_the_data_say_how_many_they_hold():
    data = as_batches((torch.randn(20, 3), torch.arange(20) % 2))
    found = objective(Mlp(), prior="normal(0, 0.5)")
    theta = {THETA: found.shell.theta.clone()}
    expected = found.value_and_grad(theta, data.first(20))[0]
    torch.testing.assert_close(found.over(theta, data.in_order(7), examples=20)[0], expected)
    with pytest.raises(ValueError, match="examples must be what the batches hold together; got 40, they hold 20"):
        found.over(theta, data.in_order(7))


# --- terms over other inputs ----------------------------------------------------------------------------------------


class FunctionPrior:
    """-log of a Gaussian process at fixed inputs: ½ fᵀ K⁻¹ f over N, a function-space prior."""

    name = "function_prior"

    def __init__(self, inputs, kernel):
        self.inputs, self.precision = inputs, torch.linalg.inv(kernel)

    def __call__(self, forward, module, batch):
        values = forward(self.inputs)
        return 0.5 * (values * (self.precision @ values)).sum() / N


def test_a_term_may_look_at_other_inputs():
    model = Mlp().double()
    batch = Batch(torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 2)
    context = torch.randn(5, 3, dtype=torch.float64)
    kernel = torch.exp(-torch.cdist(context, context).square()) + 0.1 * torch.eye(5, dtype=torch.float64)
    found = objective(model, terms=(FunctionPrior(context, kernel),))
    value, _, grads = found.value_and_grad({THETA: found.shell.theta}, batch)
    twin = copy.deepcopy(model)
    f = twin(context)
    gaussian_process = torch.distributions.MultivariateNormal(torch.zeros(5, dtype=torch.float64), kernel)
    constant = gaussian_process.log_prob(torch.zeros(5, dtype=torch.float64))
    term = -sum(gaussian_process.log_prob(f[:, k]) - constant for k in range(2)) / N
    expected = -F.cross_entropy(twin(batch.inputs), batch.targets) - term
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(found.named["function_prior"], term.detach())
    torch.testing.assert_close(grads[THETA], gradient_of(twin, expected))
    torch.testing.assert_close(found({THETA: found.shell.theta}, batch)[0], expected.detach())
    together = found.value_and_grad({THETA: found.shell.theta.expand(2, -1)}, _doubled(batch))
    torch.testing.assert_close(together[0], expected.detach().expand(2))


def _doubled(batch):
    return Batch(torch.stack([batch.inputs] * 2), torch.stack([batch.targets] * 2))


# --- precision ------------------------------------------------------------------------------------------------------


def test_autocast_computes_in_bfloat16_and_keeps_weights_gradients_and_probabilities_in_float32():
    seen = []

    class Spy(Mlp):
        def forward(self, x):
            seen.append((hidden := self.net[0](x)).dtype)
            return self.net[1:](hidden)

    model = Spy(hidden=64)
    batch = Batch(torch.randn(64, 3), torch.randint(2, (64,)))
    low, full = objective(model, autocast=True), objective(model)
    value, _, grads = low.value_and_grad({THETA: low.shell.theta}, batch)
    expected = full.value_and_grad({THETA: full.shell.theta}, batch)
    assert seen == [torch.bfloat16, torch.float32]
    assert (low.shell.theta.dtype, grads[THETA].dtype, value.dtype) == (torch.float32,) * 3
    assert torch.equal(low.shell.theta, full.shell.theta)
    assert not torch.equal(value, expected[0])
    torch.testing.assert_close(value, expected[0], atol=0.01, rtol=0.01)  # bfloat16 has 8 bits
    torch.testing.assert_close(grads[THETA], expected[2][THETA], atol=0.01, rtol=0.05)


# --- priors over the vector -----------------------------------------------------------------------------------------

SIZE = 6


def blocks():
    """Every kind of block over 6 weights, with its dense covariance by its own definition."""
    make = {"dtype": torch.float64}
    sd, factor = torch.rand(SIZE, **make) + 0.3, torch.randn(2, SIZE, **make)
    tril = torch.randn(SIZE, SIZE, **make).tril() + 2 * torch.eye(SIZE, **make)
    left, right = (torch.randn(n, n, **make) for n in (2, 3))
    b, a = left @ left.T, right @ right.T
    (out_values, out_vectors), (in_values, in_vectors) = torch.linalg.eigh(b), torch.linalg.eigh(a)
    some = Kronecker(out_values, in_values[1:], torch.tensor(0.7, **make), out_vectors, in_vectors[:, 1:])
    rank_two = in_vectors[:, 1:] @ in_values[1:].diag() @ in_vectors[:, 1:].T
    eye = torch.eye(SIZE, **make)
    columns, values = torch.randn(SIZE, 2, **make), torch.tensor([3.0, 0.5], **make)
    yield "diagonal", Diagonal(sd.square()), sd.square().diag()
    yield "dense", Dense(tril), tril @ tril.T
    yield "deviations", Deviations(sd, factor), sd.square().diag() + factor.T @ factor
    yield "kronecker", some, torch.linalg.inv(torch.kron(b, rank_two) + 0.7 * eye)
    low = LowRank.of(1 / sd.square(), columns, values)
    yield "low rank", low, torch.linalg.inv((1 / sd.square()).diag() + columns @ values.diag() @ columns.T)


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("kind", ["diagonal", "dense", "deviations", "kronecker", "low rank"])
def test_an_earlier_posterior_as_prior_is_the_dense_gaussian(kind, shape):
    _, block, covariance = next(row for row in blocks() if row[0] == kind)
    index = torch.tensor([9, 1, 4, 0, 7, 2])  # places out of order, weights 3, 5, 6 and 8 in no block
    mean = torch.randn(10, dtype=torch.float64)
    prior = GaussianPrior(GaussianLaw(mean, (index,), (block,)))
    theta = torch.randn(*shape, 10, dtype=torch.float64)
    dense = torch.distributions.MultivariateNormal(mean[index], covariance)
    expected = dense.log_prob(theta[..., index]) - dense.log_prob(mean[index])
    torch.testing.assert_close(prior.log_prob(theta), expected)
    grad = torch.full_like(theta, torch.nan)
    value = prior.write(theta, grad, 0.25)
    torch.testing.assert_close(value, 0.25 * expected)
    slope = torch.zeros_like(theta)
    slope[..., index] = -0.25 * (theta[..., index] - mean[index]) @ torch.linalg.inv(covariance)
    torch.testing.assert_close(grad, slope)
    leaf = theta.clone().requires_grad_()
    (automatic,) = torch.autograd.grad(prior.log_prob(leaf).sum(), leaf)
    torch.testing.assert_close(0.25 * automatic, grad)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_named_priors_give_each_parameter_its_law(shape):
    space = Space.of(Mlp().double())
    prior = NamedPrior(as_prior({"net.0.*": "normal(0, 0.5)", "*bias": "flat", "*": "laplace(0.1, 2)"}), space)
    theta = torch.randn(*shape, space.size, dtype=torch.float64)
    views = space.views(theta)

    def total(values):
        return sum(
            law.log_prob(values[name]).flatten(len(shape)).sum(-1)
            for name, law in {
                "net.0.weight": Normal(0.0, 0.5),
                "net.0.bias": Normal(0.0, 0.5),
                "net.3.weight": torch.distributions.Laplace(0.1, 2.0),
            }.items()
        )

    torch.testing.assert_close(prior.log_prob(theta), total(views))
    grad = torch.full_like(theta, torch.nan)
    torch.testing.assert_close(prior.write(theta, grad, 0.1), 0.1 * total(views))
    leaf = theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(space.views(leaf)).sum(), leaf)
    torch.testing.assert_close(grad, 0.1 * expected)


# --- what must stay as it was ---------------------------------------------------------------------------------------


def test_the_users_model_is_never_changed():
    model, batch = case("plain")
    before = copy.deepcopy(model.state_dict())
    found = objective(model, prior="normal(0, 1)")
    found.value_and_grad({THETA: torch.randn_like(found.shell.theta)}, batch)
    found({THETA: torch.randn_like(found.shell.theta)}, batch)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_pure_call_moves_neither_weights_nor_running_averages():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    found = objective(model, train=True)
    theta = found.shell.theta.clone()
    before = {name: value.clone() for name, value in found.shell.buffers.items()}
    found({THETA: theta + 1}, Batch(torch.randn(6, 3), torch.arange(6) % 2))
    assert torch.equal(found.shell.theta, theta)
    assert all(torch.equal(before[name], value) for name, value in found.shell.buffers.items())
    found.value_and_grad({THETA: theta}, Batch(torch.randn(6, 3), torch.arange(6) % 2))
    assert not torch.equal(before["1.running_mean"], found.shell.buffers["1.running_mean"])


def test_a_subset_of_names_leaves_the_rest():
    model, batch = case("plain")
    value, _ = bf.log_joint(model, Categorical(), None, 6)({"net.3.bias": torch.zeros(2)}, batch)
    with torch.no_grad():
        model.net[3].bias.zero_()
        expected = -F.cross_entropy(model(batch.inputs), batch.targets)
    torch.testing.assert_close(value, expected)


def test_wrong_questions_are_named():
    with pytest.raises(ValueError, match="num_data must be the number of training examples, at least 1; got 0"):
        bf.log_joint(Mlp(), "categorical", None, 0)
    with pytest.raises(ValueError, match="num_data must be the number of training examples, at least 1; got 0"):
        objective(Mlp(), num_data=0)
    with pytest.raises(ValueError, match="samples must be at least 1; got 0"):
        objective(Mlp(), samples=0)
    model, batch = case("plain")
    shell = Skeleton(model, Space.of(model)).shell(gradients=False)
    with pytest.raises(ValueError, match="shell must have gradients for value_and_grad"):
        Objective(shell, Categorical(), 6).value_and_grad({THETA: shell.theta}, batch)


def test_kl_weight_zero_leaves_the_likelihood_alone():
    found = objective(variational(), train=True, kl_weight=Constant(0.0))
    with seeded():
        value, outputs, _ = found.value_and_grad({THETA: found.shell.theta}, POINTS)
    torch.testing.assert_close(value, -F.cross_entropy(outputs, POINTS.targets))
    assert not math.isclose(kl_divergence(found.shell.module).item(), 0.0)
