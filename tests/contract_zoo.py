"""The models that people bring, small, each with data for it: what every method must take or refuse with a reason.

A new kind joins by a function under `@kind`: it returns an `Example`, built from torch's global stream, which the
caller seeds. Most have attention and dropout, since methods that need these refuse what has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from bayesformer.models import Encoder, GraphAttentionNetwork, SequenceClassifier

N, T, D, C, V = 8, 5, 4, 3, 11


@dataclass(frozen=True)
class Example:
    """A model, training data, what to predict on, the likelihood by name, and which weights are learned."""

    model: nn.Module
    data: Any
    inputs: Any  # as the model is called, a few rows
    likelihood: Any = "categorical"
    infer: Any = None
    epochs: int = 2


KINDS: dict[str, Callable[[], Example]] = {}


def kind(make: Callable[[], Example]) -> Callable[[], Example]:
    """List a kind of model under the name of its function."""
    KINDS[make.__name__] = make
    return make


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int, seed: int = 2, low: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def sequences(model: nn.Module, n: int = N, infer: Any = None) -> Example:
    """Real sequences (n, T, D) in, one of C classes out."""
    x = numbers(n, T, D)
    return Example(model, (x, whole(C, n)), x[:3], infer=infer)


def padded_tokens(n: int = N, high: int = V) -> dict[str, torch.Tensor]:
    mask = torch.ones(n, T, dtype=torch.int64)
    mask[1::2, T - 2 :] = 0
    return {"input_ids": whole(high, n, T, low=2), "attention_mask": mask}


def texts(model: nn.Module, infer: Any = None, **more: Any) -> Example:
    """Padded tokens in, one of C classes out, called by keywords; `more` are keywords that are no tensors."""
    inputs = padded_tokens()
    few = {name: value[:3] for name, value in inputs.items()}
    return Example(model, {**inputs, **more, "labels": whole(C, N)}, {**few, **more}, infer=infer)


def images(model: nn.Module) -> Example:
    x = numbers(N, 1, 8, 8)
    return Example(model, ({"pixel_values": x}, whole(C, N)), {"pixel_values": x[:3]})


class Attends(nn.Module):
    """Packed attention with a residual and dropout, the mean over positions, a head: the smallest of its kind."""

    def __init__(self, width: int = 8, outputs: int = C) -> None:
        super().__init__()
        self.embed = nn.Linear(D, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, outputs)

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.drop(torch.tanh(h + self.attention(h, h, h, need_weights=False)[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixed(x).mean(1))


@kind
def all_weights() -> Example:
    """A transformer of this library, all weights learned, tokens with padding."""
    encoder = Encoder(8, 1, 2, mlp_ratio=1, dropout=0.1, max_length=8)
    return texts(SequenceClassifier(encoder, vocabulary=V, classes=C))


class WritesItsInput(Attends):
    """Works in place on what it is given, as a first nn.ReLU(inplace=True) does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5).relu_())


@kind
def writes_its_input() -> Example:
    """A forward that overwrites its input: data and questions must stay what they were."""
    return sequences(WritesItsInput())


@kind
def no_dropout() -> Example:
    """Nothing random and no attention: three methods refuse it."""
    x = numbers(N, D)
    return Example(nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C)), (x, whole(C, N)), x[:3])


@kind
def frozen_base() -> Example:
    """A frozen base under a head that is learned."""
    model = Attends()
    model.embed.requires_grad_(False)
    model.attention.requires_grad_(False)
    return sequences(model)


@kind
def only_biases() -> Example:
    """Only the biases are learned, chosen by `infer="*bias"`."""
    return sequences(Attends(), infer="*bias")


class Scaled(Attends):
    """A number without dimensions that multiplies the logits, as CLIP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.logit_scale.exp()


@kind
def scalar_parameter() -> Example:
    """A learned number without dimensions that scales the logits, as in CLIP."""
    return sequences(Scaled())


class TiedTagger(nn.Module):
    """Tokens in, tokens out, the embedding used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.unembed = nn.Linear(8, V, bias=False)
        self.unembed.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        return self.unembed(torch.tanh(h + self.attention(h, h, h)[0]))


@kind
def tied_weights() -> Example:
    """The embedding of tokens is also the output layer."""
    ids = whole(V, N, T)
    return Example(TiedTagger(), (ids, whole(V, N, T, seed=3)), ids[:3])


@kind
def tied_by_alias() -> Example:
    """The tied weight is named by its second name, and is all that is learned besides a bias."""
    ids = whole(V, N, T)
    return Example(TiedTagger(), (ids, whole(V, N, T, seed=3)), ids[:3], infer=("unembed*", "*in_proj_bias"))


class Normed(Attends):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mixed(x).mean(1)))


@kind
def batch_norm() -> Example:
    """Nine examples in batches of four: the last batch would have one."""
    return sequences(Normed(), n=9)


@kind
def batch_norm_frozen() -> Example:
    """A trained network in evaluation mode whose normalisation is not learned."""
    model = Normed()
    with torch.no_grad():
        for _ in range(3):
            model(2 + numbers(N, T, D))
    model.norm.requires_grad_(False)
    return sequences(model.eval())


class Running(Attends):
    """A counter that every pass moves and that shows in the outputs, and a mean that training passes move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.mean((0, 1)), 0.1)
        return super().forward(x - self.seen) + 0.1 * self.passes * torch.arange(C)


@kind
def own_buffers() -> Example:
    """Buffers of its own that passes move: a counter, and a running mean."""
    return sequences(Running())


@kind
def parametrised() -> Example:
    """Weights under `weight_norm` and `orthogonal` of torch.nn.utils.parametrizations."""
    model = Attends()
    parametrizations.weight_norm(model.embed)
    parametrizations.orthogonal(model.head)
    return sequences(model)


class FunctionalDropout(Attends):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(F.dropout(x, 0.2, self.training))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(F.dropout(h, p=0.2, training=self.training).mean(1))


@kind
def functional_dropout() -> Example:
    """Dropout by `F.dropout` instead of modules."""
    return sequences(FunctionalDropout())


class Noisy(Attends):
    """Noise of torch and of numpy in every pass, in training and in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = float(numpy.random.normal(0, 0.1))  # noqa: NPY002 (what people write)
        return super().forward(x + 0.1 * torch.randn_like(x) + shift)


@kind
def own_noise() -> Example:
    """Noise of torch and numpy in forward, in training and in evaluation."""
    return sequences(Noisy())


class Stack(nn.Module):
    """torch's own encoder with padding: packed projections, dropout inside attention, a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
        self.head = nn.Linear(8, C)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        h = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        kept = attention_mask.unsqueeze(-1)
        return self.head((h.masked_fill(kept == 0, 0)).sum(1) / kept.sum(1))


@kind
def encoder_stack() -> Example:
    """`nn.TransformerEncoder` with a padding mask: packed attention, modular dropout."""
    return texts(Stack())


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        self.drop, self.head = nn.Dropout2d(0.1), nn.Linear(4, C)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        h = self.drop(F.max_pool2d(torch.relu(self.first(pixel_values)), 2))
        return self.head(torch.relu(self.second(h)).mean((-1, -2)))


@kind
def convolutions() -> Example:
    """A small CNN with pooling and `Dropout2d`."""
    return images(Conv())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, 6, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(6, C)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@kind
def lstm() -> Example:
    """An LSTM of two layers with dropout between them."""
    return sequences(Recurrent())


def one_graph() -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A ring of nodes with chords as a batch of one: features (1, n, D), edges (1, 2, E), and classes (1, n)."""
    n = 7
    ring = torch.stack([torch.arange(n), torch.arange(1, n + 1) % n])
    edges = torch.cat([ring, ring.flip(0), torch.tensor([[0, 2, 5], [3, 6, 1]])], 1)
    return (numbers(1, n, D), edges[None]), whole(C, 1, n)


@kind
def graph_attention() -> Example:
    """The graph attention network of this library on one graph."""
    inputs, targets = one_graph()
    return Example(GraphAttentionNetwork(D, C, width=4, heads=2, dropout=0.2), (inputs, targets), inputs, epochs=6)


class Geometric(nn.Module):
    """Two layers of PyTorch Geometric."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.first, self.second = GATConv(D, 4, heads=2, dropout=0.2), GATConv(8, C)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        h = F.elu(self.first(x[0], edge_index[0]))
        return self.second(F.dropout(h, 0.2, self.training), edge_index[0])[None]


@kind
def geometric() -> Example:
    """`GATConv` layers of PyTorch Geometric."""
    inputs, targets = one_graph()
    return Example(Geometric(), (inputs, targets), inputs, epochs=6)


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def _bert() -> nn.Module:
    import transformers

    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, vocab_size=V, num_labels=C, max_position_embeddings=8, pad_token_id=0)
    )


@kind
def bert() -> Example:
    """transformers' BERT for sequence classification."""
    return texts(_bert())


@kind
def bert_head() -> Example:
    """The same with only the classifier learned, chosen by a predicate."""
    return texts(_bert(), infer=lambda name, weight: name.startswith("classifier"))


@kind
def bert_tuple() -> Example:
    """Outputs as a plain tuple, asked for by keywords that are no tensors."""
    return texts(_bert(), return_dict=False, output_attentions=False)


@kind
def gpt2() -> Example:
    """transformers' GPT-2 as a language model, labels = input_ids, `use_cache=False`."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=V, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1, pad_token_id=0
    )
    inputs = {**padded_tokens(), "use_cache": False}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    few = {"input_ids": inputs["input_ids"][:3], "attention_mask": inputs["attention_mask"][:3], "use_cache": False}
    return Example(transformers.GPT2LMHeadModel(config), {**inputs, "labels": labels}, few)


@kind
def t5() -> Example:
    """transformers' T5 with labels, decoder inputs made of them."""
    import transformers

    config = transformers.T5Config(
        vocab_size=V, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0,
        eos_token_id=1, dropout_rate=0.1,
    )  # fmt: skip
    inputs = padded_tokens()
    few = {name: value[:3] for name, value in inputs.items()} | {"decoder_input_ids": whole(V, 3, 4)}
    model = transformers.T5ForConditionalGeneration(config)
    return Example(model, {**inputs, "labels": whole(V, N, 4, low=2, seed=3)}, few)


@kind
def vit() -> Example:
    """transformers' vision transformer."""
    import transformers

    config = transformers.ViTConfig(
        **SMALL, image_size=8, patch_size=4, num_channels=1, num_labels=C,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return images(transformers.ViTForImageClassification(config))


@kind
def swin() -> Example:
    """transformers' Swin: windowed attention in two stages."""
    import transformers

    config = transformers.SwinConfig(
        embed_dim=4, depths=[2, 1], num_heads=[2, 2], window_size=2, patch_size=2, image_size=8, num_channels=1,
        num_labels=C, hidden_dropout_prob=0.1, drop_path_rate=0.0,
    )  # fmt: skip
    return images(transformers.SwinForImageClassification(config))


@kind
def whisper() -> Example:
    """transformers' Whisper: frozen positions of its own; encoder, decoder and cross attention."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=V, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=6,
        max_target_positions=8, dropout=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    sounds = numbers(N, 4, 12)
    data = {"input_features": sounds, "labels": whole(V, N, 4, low=2, seed=3)}
    few = {"input_features": sounds[:3], "decoder_input_ids": whole(V, 3, 4)}
    return Example(transformers.WhisperForConditionalGeneration(config), data, few)


@kind
def lora() -> Example:
    """PEFT adapters on BERT, whose classifier is trained too."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.1)
    return texts(peft.get_peft_model(_bert(), config))


@kind
def dora() -> Example:
    """PEFT adapters with learned magnitudes (DoRA), whose norms are detached."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", use_dora=True)
    return texts(peft.get_peft_model(_bert(), config))


def _llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL, vocab_size=V, num_key_value_heads=1, max_position_embeddings=8, pad_token_id=0, bos_token_id=1,
            eos_token_id=1,
        )
    )  # fmt: skip


@kind
def lora_bfloat16() -> Example:
    """A Llama in bfloat16 with float32 adapters, chosen by pattern; logits come in bfloat16."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
    model = peft.get_peft_model(_llama(), config)
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    inputs = padded_tokens()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    few = {name: value[:3] for name, value in inputs.items()}
    return Example(model, {**inputs, "labels": labels}, few, infer="*lora*")


class HalfBase(Attends):
    """A base in bfloat16 under a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.attention):
            part.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mixed(x.to(torch.bfloat16)).mean(1).float())


@kind
def bfloat16_base() -> Example:
    """A frozen base in bfloat16 under a float32 head."""
    return sequences(HalfBase())


@kind
def bfloat16_weights() -> Example:
    """All weights learned in bfloat16: they are kept, and drawn, in float32."""
    x = numbers(N, T, D).bfloat16()
    return Example(Attends().bfloat16(), (x, whole(C, N)), x[:3])


class Several(Attends):
    """A tuple whose first entry is the outputs, which are real numbers."""

    def __init__(self) -> None:
        super().__init__(outputs=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        h = self.mixed(x)
        return self.head(h.mean(1)), {"states": h}


@kind
def tuple_output() -> Example:
    """A mean and a scale for a Gaussian likelihood, in a tuple."""
    from bayesformer.likelihoods import Gaussian

    x = numbers(N, T, D)
    return Example(Several(), (x, numbers(N, 1, seed=3)), x[:3], Gaussian(scale=None))


@kind
def float64() -> Example:
    """A model in float64."""
    x = numbers(N, T, D).double()
    return Example(Attends().double(), (x, whole(C, N)), x[:3])


class Gate(nn.Module):
    """Lets everybody through but a thread called "held", which waits here until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.release = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "held":
            self.inside.set()
            assert self.release.wait(60), "nobody released the prediction that was held"
        return x


def build(name: str, seed: int = 0) -> Example:
    """The example of a kind, its model drawn under a seed; the caller's stream is as before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return KINDS[name]()
