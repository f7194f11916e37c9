"""Small models of every kind with data for them, and the curvature by its definition, one output at a time."""

import torch
import transformers
from torch import nn

from bayesformer.data import Data
from bayesformer.likelihoods import Bernoulli, Categorical, Gaussian
from bayesformer.model.calling import apply
from bayesformer.model.space import Space
from bayesformer.models import Encoder, Regressor, SequenceClassifier, Tagger, VisionTransformer
from tests.nets import Mlp, Tied

N, T, V = 4, 5, 7


def inferred(model):
    """The weights that a posterior is over, by name."""
    return {name: model.get_parameter(name) for name in Space.of(model).names}


TINY = {
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 6,
    "vocab_size": V,
    "max_position_embeddings": 6,
    "pad_token_id": 0,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 4, "patch_size": 2, "num_channels": 1}


class Layer(nn.Module):
    """torch's own encoder layer with packed attention, padding, and the mean over tokens."""

    def __init__(self, batch_first=True):
        super().__init__()
        self.first = batch_first
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x, attention_mask):
        states = x if self.first else x.transpose(0, 1)
        states = self.layer(states, src_key_padding_mask=~attention_mask.bool())
        states = states if self.first else states.transpose(0, 1)
        kept = attention_mask.unsqueeze(-1)
        return self.head((states * kept).sum(1) / kept.sum(1))


class Cross(nn.Module):
    """torch's decoder layer: self-attention and cross-attention, packed weights by rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerDecoderLayer(4, 2, 6, batch_first=True), nn.Linear(4, 2)

    def forward(self, x, memory):
        return self.head(self.layer(x, memory)[:, 0])


class Convolution(nn.Module):
    """Patches by a convolution, a class token, learned positions, a shared layer, a scalar and a bare product."""

    def __init__(self):
        super().__init__()
        self.patch, self.line = nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Conv1d(3, 3, 3, padding=1)
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.randn(12, 3))
        self.shared, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.7))
        self.matrix, self.odd = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3, 3))

    def forward(self, images):
        x = self.patch(images).flatten(2)
        x = torch.cat([self.token.expand(len(x), -1, -1), self.line(x).mT], 1)
        x = x + self.table[: x.shape[1]]
        x = self.shared(torch.tanh(self.shared(x)) * self.scale)
        x = torch.einsum("bti,ij->btj", x, self.odd)  # no rule for this one
        return x.mean(1) @ self.matrix


def _ids(padded=True):
    ids = torch.randint(1, V, (N, T))
    mask = torch.ones(N, T, dtype=torch.long)
    if padded:
        mask[1, 3:], mask[2, 2:] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _classes(count=3):
    return torch.randint(count, (N,))


def _token_labels(inputs, classes):
    labels = torch.randint(classes, (N, T))
    return labels.masked_fill(inputs["attention_mask"] == 0, -100)


def _vit():
    return VisionTransformer(4, 2, 1, 3, dim=4, depth=1, heads=2, mlp_ratio=1), Categorical(), torch.randn(N, 1, 4, 4)


def _huggingface(name):
    if name == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**TINY, num_labels=3))
    if name == "gpt2":
        sizes = {"n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 6, "n_positions": 6, "vocab_size": V}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **SPECIAL, pad_token_id=0))
    if name == "llama":
        config = transformers.LlamaConfig(**TINY, **SPECIAL, num_key_value_heads=1, num_labels=2)
        return transformers.LlamaForSequenceClassification(config)
    sizes = {k: v for k, v in TINY.items() if k not in {"vocab_size", "max_position_embeddings", "pad_token_id"}}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **IMAGE, num_labels=3))


def _lora():
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], init_lora_weights=False)
    return peft.get_peft_model(_huggingface("bert"), config)


def build(name):
    """(model, likelihood, data) in float64, seeded by the test."""
    model, likelihood, data = _build(name)
    model = model.double().eval()
    for parameter in inferred(model).values():
        nn.init.normal_(parameter, std=0.6)  # gains of 1 and biases of 0 would hide mistakes

    def cast(x):
        return x.double() if x.is_floating_point() else x

    inputs = data.inputs
    inputs = {k: cast(v) for k, v in inputs.items()} if isinstance(inputs, dict) else inputs
    inputs = tuple(map(cast, inputs)) if isinstance(inputs, tuple) else inputs
    inputs = cast(inputs) if isinstance(inputs, torch.Tensor) else inputs
    return model, likelihood, Data(inputs, cast(data.targets), data.mask)


def _build(name):  # noqa: PLR0911
    ids = _ids()
    if name == "mlp":
        return Mlp(3, 4, 2), Gaussian(scale=0.5), Data(torch.randn(N, 3), torch.randn(N, 2))
    if name == "bernoulli":
        mask = torch.rand(N, 2) < 0.8
        mask[0] = True
        return Mlp(3, 4, 2), Bernoulli(), Data(torch.randn(N, 3), torch.randint(2, (N, 2)).float(), mask)
    if name == "vit":
        model, likelihood, x = _vit()
        return model, likelihood, Data(x, _classes())
    if name == "tagger":
        return Tagger(Encoder(4, 1, 2, mlp_ratio=1), V, 3), Categorical(), Data(ids, _token_labels(ids, 3))
    if name == "classifier":
        model = SequenceClassifier(Encoder(4, 1, 2, mlp_ratio=1, positions="learned", max_length=8), V, 3)
        return model, Categorical(), Data(ids, _classes())
    if name == "regressor":
        mask = torch.ones(N, T, dtype=torch.bool)
        mask[0, :2] = False
        x = torch.randn(N, T, 1)
        return Regressor(Encoder(4, 1, 2, causal=True, mlp_ratio=1)), Gaussian(), Data(x, torch.randn(N, T, 1), mask)
    if name in {"layer", "layer_second"}:
        data = Data({"x": torch.randn(N, T, 4), "attention_mask": ids["attention_mask"]}, _classes())
        return Layer(name == "layer"), Categorical(), data
    if name == "cross":
        return Cross(), Gaussian(), Data((torch.randn(N, 3, 4), torch.randn(N, T, 4)), torch.randn(N, 1))
    if name == "convolution":
        return Convolution(), Categorical(), Data(torch.randn(N, 2, 4, 4), _classes(2))
    if name == "tied":
        return Tied(), Categorical(), Data(torch.randint(5, (N, T)), torch.randint(5, (N, T)))
    if name == "gpt2":
        return _huggingface(name), Categorical(), Data(ids, _token_labels(ids, V))
    if name == "hf_vit":
        return _huggingface(name), Categorical(), Data(torch.randn(N, 1, 4, 4), _classes())
    model = _lora() if name == "lora" else _huggingface(name)
    return model, Categorical(), Data(ids, _classes(2 if name == "llama" else 3))


POOLED = ("mlp", "bernoulli", "vit", "classifier", "layer", "layer_second", "cross", "convolution", "bert", "llama",
          "hf_vit", "lora")  # fmt: skip
SEQUENCES = ("tagger", "regressor", "tied", "gpt2")
MODELS = POOLED + SEQUENCES


def jacobian(model, batch):
    """(M, P): every output of one example after the other, by autograd."""
    outputs = apply(model, batch.inputs)
    parameters = list(inferred(model).values())
    rows = []
    for output in outputs.flatten():
        gradients = torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows), outputs.detach()


def ggn(model, likelihood, data):
    """Σ_n J_nᵀ Λ_n J_n, an example at a time."""
    size = Space.of(model).size
    total = torch.zeros(size, size, dtype=torch.float64)
    for n in range(len(data)):
        batch = data.take(slice(n, n + 1))
        rows, outputs = jacobian(model, batch)
        blocks = likelihood.hessian(outputs)[0]
        kept = likelihood.counted(batch.targets, batch.mask)
        kept = torch.ones(outputs.shape[:-1]) if kept is None else kept
        if blocks.dim() == 2:
            weights = kept[0].double().reshape(-1)
            weights = weights.expand(len(blocks)) if len(weights) == 1 else weights
            information = blocks * weights.unsqueeze(0) * weights.unsqueeze(1)
        else:
            information = torch.block_diag(*(blocks * kept[0].double()[:, None, None]))
        total += rows.T @ information @ rows
    return total


def empirical(model, likelihood, data):
    """Σ_n g_n g_nᵀ, g_n the gradient of an example's log-likelihood."""
    total = 0
    for n in range(len(data)):
        batch = data.take(slice(n, n + 1))
        value = likelihood.log_prob(apply(model, batch.inputs), batch.targets, batch.mask).sum()
        gradients = torch.autograd.grad(value, list(inferred(model).values()), allow_unused=True)
        named = zip(inferred(model).values(), gradients, strict=True)
        row = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in named])
        total = total + row.outer(row)
    return total


def assembled(curvature, size):
    """(P, P): the blocks of a curvature in one matrix, 0 outside."""
    total = torch.zeros(size, size, dtype=torch.float64)
    for place, structure in zip(curvature.places, curvature.structures, strict=True):
        index = torch.arange(place.start, place.stop) if isinstance(place, slice) else place
        total[index.unsqueeze(1), index] = structure.dense()
    return total
