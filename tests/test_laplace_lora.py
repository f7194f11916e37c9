"""Laplace on LoRA adapters: closed forms on a linear model, one input factor for q, k and v, and cut factors."""

import peft
import pytest
import torch
import transformers
from torch import nn

import bayesformer as bf
from bayesformer.data import Data
from bayesformer.laplace import estimate
from bayesformer.laplace import kronecker_curvature as kron
from bayesformer.laplace.factors import DenseFactor, InputFactor, SketchFactor
from bayesformer.laws import Kronecker
from bayesformer.likelihoods import Categorical, Gaussian

F64 = torch.float64
D, R, OUT, N, SIGMA, ALPHA = 6, 2, 3, 20, 0.5, 6


class Projections(nn.Module):
    """Three linear maps of one input, as queries, keys and values are; outputs side by side, so that all is linear."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, OUT, bias=False) for _ in range(3))

    def forward(self, x):
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def adapted(base=None, targets=("q", "k", "v"), **more):
    config = peft.LoraConfig(r=R, lora_alpha=ALPHA, target_modules=list(targets), init_lora_weights=False, **more)
    return peft.get_peft_model(Projections().double() if base is None else base, config).eval()


def by_name(found):
    return {name: structure for (name,), structure in zip(found.names, found.structures, strict=True)}


def test_a_linear_model_has_the_factors_of_its_closed_form():
    """Of a Gaussian: c² BᵀB / σ² ⊗ Σ x xᵀ for A, and c² I / σ² ⊗ Σ (A x)(A x)ᵀ for B, both exact."""
    model, x = adapted(), torch.randn(N, D, dtype=F64)
    found = by_name(estimate(model, Gaussian(SIGMA), Data(x, torch.randn(N, 3 * OUT, dtype=F64)), "kron"))
    c = ALPHA / R
    assert len(found) == 6
    for part in "qkv":
        layer = getattr(model.base_model.model, part)
        a, b = (getattr(layer, f"lora_{which}")["default"].weight.detach() for which in "AB")
        of_a = torch.kron(c**2 * b.T @ b / SIGMA**2, x.T @ x)
        h = x @ a.T
        of_b = torch.kron(c**2 * torch.eye(OUT, dtype=F64) / SIGMA**2, h.T @ h)
        names = [f"base_model.model.{part}.lora_{which}.default.weight" for which in "AB"]
        torch.testing.assert_close(found[names[0]].dense(), of_a)
        torch.testing.assert_close(found[names[1]].dense(), of_b)


def test_the_posterior_of_a_linear_model_is_the_closed_form_given_the_prior():
    model, x = adapted(), torch.randn(N, D, dtype=F64)
    data = (x, torch.randn(N, 3 * OUT, dtype=F64))
    posterior = bf.laplace(model, data, likelihood=Gaussian(SIGMA), prior_precision=2.0, infer=["*q.lora_B*"])
    a = model.base_model.model.q.lora_A["default"].weight.detach()
    h = (ALPHA / R) * x @ a.T
    precision = torch.kron(torch.eye(OUT, dtype=F64), h.T @ h) / SIGMA**2 + 2 * torch.eye(OUT * R, dtype=F64)
    torch.testing.assert_close(posterior.law.precision(), precision)


@pytest.mark.parametrize("kind", ["classes", "tokens"])
def test_shared_factors_are_those_of_separate_sums(kind, monkeypatch):
    """The factor of the common input is summed and decomposed once, and equals what each matrix would find alone."""
    model = adapted()
    x = torch.randn(N, D, dtype=F64) if kind == "classes" else torch.randn(N, 4, D, dtype=F64)
    data = Data(x, torch.randint(3 * OUT, x.shape[:-1]))
    pairs = []
    own = InputFactor.pairs
    monkeypatch.setattr(InputFactor, "pairs", lambda self: (pairs.append(id(self)), own(self))[1])
    shared = by_name(estimate(model, Categorical(), data, "kron", batch_size=7, kind="fisher"))
    together = [shared[f"base_model.model.{part}.lora_A.default.weight"] for part in "qkv"]
    assert len({one.in_vectors.data_ptr() for one in together}) == 1
    assert len(set(pairs)) == 4  # one for x, and one for the input of each B
    monkeypatch.setattr(kron, "_same", lambda a, b: False)
    apart = by_name(estimate(model, Categorical(), data, "kron", batch_size=7, kind="fisher"))
    for name, structure in apart.items():
        torch.testing.assert_close(structure.dense(), shared[name].dense())


class Changing(nn.Module):
    """Two maps of one input, until a batch begins with a number above 5: then of two inputs."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(D, OUT, bias=False), nn.Linear(D, OUT, bias=False)

    def forward(self, x):
        other = x.flip(-1) if float(x[0, 0]) > 5 else x
        return torch.cat([self.q(x), self.k(other)], -1)


def test_inputs_that_part_on_the_way_have_factors_of_their_own(monkeypatch):
    model, x = adapted(Changing().double(), ("q", "k")), torch.randn(12, D, dtype=F64)
    x[8, 0] = 9.0
    data = Data(x, torch.randn(12, 2 * OUT, dtype=F64))
    found = by_name(estimate(model, Gaussian(1.0), data, "kron", batch_size=4))
    monkeypatch.setattr(kron, "_same", lambda a, b: False)
    apart = by_name(estimate(model, Gaussian(1.0), data, "kron", batch_size=4))
    for name, structure in apart.items():
        torch.testing.assert_close(structure.dense(), found[name].dense())


def test_a_posterior_with_shared_factors_is_saved_once_and_loaded_whole(tmp_path):
    model, x = adapted(), torch.randn(N, D, dtype=F64)
    data = (x, torch.randn(N, 3 * OUT, dtype=F64))
    posterior = bf.laplace(model, data, likelihood=Gaussian(SIGMA), structure="kron", prior_precision=1.0)
    tensors = posterior.law.tensors()
    assert sum(name.endswith("in_vectors") for name in tensors) == 4
    assert sum(name.endswith("in_vectors.same") for name in tensors) == 2
    posterior.save(tmp_path)
    loaded = bf.Posterior.load(tmp_path, model)
    assert torch.equal(loaded.law.rows(3, seed=1), posterior.law.rows(3, seed=1))
    torch.testing.assert_close(loaded.law.precision(), posterior.law.precision())
    held = [block.in_vectors.data_ptr() for block in loaded.law.blocks if isinstance(block, Kronecker)]
    assert len(set(held)) == 4


@pytest.mark.parametrize("rank", [2, 5, 30])
def test_what_a_cut_factor_leaves_out_is_known(rank):
    """The share of the trace that is said to be lost is that of the difference to the dense factor."""
    rows = torch.randn(200, 60, dtype=F64) * torch.linspace(1, 0.01, 60, dtype=F64)
    sketch, dense = SketchFactor(60, rows, rank), DenseFactor(60, rows)
    for part in rows.split(50):
        sketch.add(part)
        dense.add(part)
    values, vectors = sketch.pairs(0.5)
    difference = 0.5 * dense.total - (vectors * values) @ vectors.T
    assert sketch.lost == pytest.approx(float(difference.trace() / (0.5 * dense.total.trace())), abs=1e-9)
    assert torch.linalg.eigvalsh(difference).min() > -1e-9 * dense.total.trace()  # only ever too little
    best = torch.linalg.eigvalsh(dense.total).flip(0)[rank:].sum() / dense.total.trace()
    assert float(best) - 1e-9 <= sketch.lost <= 1.5 * float(best) + 1e-3


def language_model(hidden=16):
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=hidden, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    base = transformers.LlamaForCausalLM(config)
    return adapted(base, ("q_proj", "k_proj", "v_proj", "down_proj"))


def some_text():
    ids = torch.randint(40, (12, 7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_by_one_drawn_label_per_token(dtype):
    """q, k and v of a layer share their input's factor, also where the base is bfloat16 and its input is cast."""
    torch.manual_seed(0)
    model = language_model()
    model.base_model.model.to(dtype)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = p.data.float()
    data = some_text()
    posterior = bf.laplace(
        model, data, likelihood=bf.NextToken(), prior_precision=10.0, predictive="sampled", draws=3, curvature="mc"
    )
    blocks = [block for block in posterior.law.blocks if isinstance(block, Kronecker)]
    assert len(blocks) == 2 * 2 * 4
    assert len({block.in_vectors.data_ptr() for block in blocks}) == len(blocks) - 2 * 2
    assert posterior.predict(data).epistemic.max() > 0


def test_drawn_labels_estimate_the_exact_curvature():
    model = adapted()
    data = Data(torch.randn(6, 2, D, dtype=F64), torch.randint(3 * OUT, (6, 2)))
    exact = by_name(estimate(model, Categorical(), data, "kron", kind="ggn"))
    drawn = by_name(estimate(model, Categorical(), data, "kron", kind="mc", samples=4000))
    for name, structure in exact.items():
        whole = structure.dense()
        assert float((drawn[name].dense() - whole).norm() / whole.norm()) < 0.05


def test_wide_factors_are_cut_where_it_is_asked_for():
    torch.manual_seed(0)
    model, data = language_model(), some_text()
    how = {"likelihood": bf.NextToken(), "prior_precision": 10.0, "predictive": "sampled", "draws": 3}
    whole = bf.laplace(model, data, **how)
    cut = bf.laplace(model, data, **how, widest=32, rank=8)
    assert "cut" not in whole.facts
    assert cut.facts["cut"]["factors"] == 2  # the input of the two down projections, 48 wide
    assert 0 < cut.facts["cut"]["largest_share_lost"] < 1
    wide = [block for block in cut.law.blocks if block.shape[1] == 48]
    assert [block.in_vectors.shape for block in wide] == [(48, 8)] * 2
    exact = [block for block in whole.law.blocks if block.shape[1] == 48]
    for ours, theirs in zip(wide, exact, strict=True):
        assert bool((ours.diagonal() >= theirs.diagonal() * (1 - 1e-4)).all())  # what is left out is unknown
    assert cut.predict(data).total.isfinite().all()
    with pytest.raises(ValueError, match="laplace.widest must be"):
        bf.Laplace(widest=0)


@pytest.mark.parametrize("precision", ["marglik", "validation"])
def test_the_prior_is_chosen_by_evidence_or_validation_data(precision):
    torch.manual_seed(0)
    model, data = language_model(), some_text()
    how = {"likelihood": bf.NextToken(), "predictive": "sampled", "draws": 3, "grid": 3}
    posterior = bf.laplace(model, data, validation=some_text(), prior_precision=precision, widest=32, rank=8, **how)
    assert posterior.facts["prior_precision"] != 1.0


def test_draws_of_a_large_model_are_tried_on_a_few_examples(monkeypatch):
    """On equal examples a few of them, scaled up, say what all of them say, for less."""
    from bayesformer.laplace import mode_search

    model, x = adapted(), torch.randn(1, D, dtype=F64).expand(40, D).contiguous()
    data = (x, torch.randn(1, 3 * OUT, dtype=F64).expand(40, 3 * OUT).contiguous())
    how = {"likelihood": Gaussian(SIGMA), "prior_precision": 2.0, "predictive": "sampled"}
    whole = bf.laplace(model, data, **how).facts["rise"]
    monkeypatch.setattr(mode_search, "FEW_AT_ONCE", 10**9)
    assert bf.laplace(model, data, **how).facts["rise"] == pytest.approx(whole, rel=1e-6)
