"""Other people's models, as small as they come, for tests of stochastic attention in them.

Each entry builds a model and says how to run it from embeddings, so that gradients can be asked for.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

B, T, D, V = 2, 5, 8, 30  # two heads of width 4, as in attention_zoo
SMALL = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
SEQ2SEQ = {"vocab_size": V, "d_model": D, "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def bert_config(**options):
    return transformers.BertConfig(vocab_size=V, max_position_embeddings=16, **{**SMALL, **QUIET, **options})


def gpt2_config(**options):
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2Config(
        vocab_size=V, n_embd=D, n_layer=2, n_head=2, n_positions=16, **IDS, **{**quiet, **options}
    )


def llama_config(**options):
    sizes = {**SMALL, "num_key_value_heads": 1, **options}
    return transformers.LlamaConfig(vocab_size=V, max_position_embeddings=16, initializer_range=0.5, **IDS, **sizes)


def neox_config():
    quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return transformers.GPTNeoXConfig(
        vocab_size=V, max_position_embeddings=16, initializer_range=0.5, **IDS, **SMALL, **quiet
    )


def bart():
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDES.items()}
    return transformers.BartModel(transformers.BartConfig(**SEQ2SEQ, **sizes, max_position_embeddings=16, dropout=0.0))


SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 12}


def t5():
    config = transformers.T5Config(**SEQ2SEQ, d_kv=4, d_ff=12, num_layers=1, num_heads=2, dropout_rate=0.0)
    return transformers.T5Model(config)


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with the arguments of the others."""

    def __init__(self, causal=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True)
        self.encoder, self.causal = nn.TransformerEncoder(layer, 2), causal

    def forward(self, x, mask):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        return self.encoder(x, mask=future, src_key_padding_mask=mask == 0)


@dataclass(frozen=True)
class Entry:
    """A model, whether it is causal, and whether it has an encoder and a decoder."""

    build: object
    causal: bool = False
    two: bool = False

    def run(self, model, x, mask):
        """(B, T, D) from embeddings (B, T, D); for models of two sides, those of the decoder."""
        if isinstance(model, TorchEncoder):
            return model(x, mask)
        if self.two:
            source = {"inputs_embeds": x.detach(), "attention_mask": mask}
            return model(**source, decoder_inputs_embeds=x, decoder_attention_mask=mask).last_hidden_state
        return model(inputs_embeds=x, attention_mask=mask).last_hidden_state


MODELS = {
    "bert": Entry(lambda: transformers.BertModel(bert_config(), add_pooling_layer=False)),
    "neox": Entry(lambda: transformers.GPTNeoXModel(neox_config()), causal=True),
    "gpt2": Entry(lambda: transformers.GPT2Model(gpt2_config()), causal=True),
    "llama": Entry(lambda: transformers.LlamaModel(llama_config()), causal=True),
    "bart": Entry(bart, causal=True, two=True),
    "t5": Entry(t5, causal=True, two=True),
    "torch": Entry(TorchEncoder),
    "torch causal": Entry(lambda: TorchEncoder(causal=True), causal=True),
}


def vit():
    config = transformers.ViTConfig(image_size=4, patch_size=2, num_channels=1, **SMALL, **QUIET)
    return transformers.ViTModel(config, add_pooling_layer=False)


def padding(right=True):
    """The second example has two positions of padding."""
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 3:] = 0
    return mask if right else mask.flip(1)
