"""Generation by models that cannot remember what they have read: all of it is read again, and no word changes."""

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import BertConfig, BertLMHeadModel, MambaConfig, MambaForCausalLM, XLNetConfig, XLNetLMHeadModel

import bayesformer as bf
from tests.test_generation import END, PAD, VOCABULARY, llama, padded, posterior, prompts

ENDS = {"pad_token_id": PAD, "bos_token_id": 2, "eos_token_id": END}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2}


def mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, state_size=4, **SIZES, **ENDS)).eval()


def bert():
    """A model whose forward takes a cache and returns none, unless it is a decoder."""
    torch.manual_seed(0)
    sizes = {**SIZES, "intermediate_size": 48, "num_attention_heads": 4}
    return BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, **sizes, **ENDS)).eval()


def prompted(kind):
    model = llama()
    for p in model.parameters():  # so that three virtual tokens change what is written
        p.data.mul_(1 + 4 * (p.dim() > 1))
    torch.manual_seed(1)
    return get_peft_model(model, kind(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()


WITHOUT = {
    "mamba": (mamba, "MambaForCausalLM takes no past_key_values"),
    "bert": (bert, "BertLMHeadModel returned no past_key_values"),
    "prefix": (lambda: prompted(PrefixTuningConfig), "PEFT puts the virtual tokens"),
    "prompt": (lambda: prompted(PromptTuningConfig), "PEFT puts the virtual tokens"),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize(("make", "reason"), WITHOUT.values(), ids=WITHOUT)
def test_models_without_a_cache_write_what_they_write_themselves(make, reason):
    model = make()
    for batch in (padded(), {"input_ids": prompts(), "attention_mask": torch.ones_like(prompts())}):
        own = model.generate(**batch, max_new_tokens=7, do_sample=False)[:, -7:]
        for draws in (1, 3):
            chain = posterior(model, draws, sd=0.0)
            assert torch.equal(chain.generate(batch, draws=draws, max_new_tokens=7).tokens, own)
    assert torch.equal(chain.generate(batch, draws=3, max_new_tokens=7, cached=False).tokens, own)
    with pytest.raises(ValueError, match=f"cached must be None or False for this model; got True, but {reason}"):
        chain.generate(batch, draws=1, max_new_tokens=2, cached=True)


def test_a_model_that_reads_in_any_order_is_refused():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32}
    model = XLNetLMHeadModel(XLNetConfig(vocab_size=VOCABULARY, **sizes, **ENDS)).eval()
    with pytest.raises(ValueError, match="from left to right; XLNetLMHeadModel reads in any order"):
        posterior(model, 1, sd=0.0).generate({"input_ids": prompts()}, draws=1, max_new_tokens=2)


def test_labels_without_entries_for_virtual_tokens_are_refused_with_what_to_do():
    model, ids = prompted(PromptTuningConfig), prompts(4, 5)
    call = {"likelihood": bf.NextToken(), "training": bf.Training(epochs=1, batch_size=2)}
    with pytest.raises(ValueError, match=r"shape \(4, 8\).*got \(4, 5\).*its 3 virtual tokens: put 3 labels of -100"):
        bf.fit(model, {"input_ids": ids, "labels": ids}, **call)
    labels = torch.cat([torch.full((4, 3), -100), ids], 1)
    assert bf.fit(model, {"input_ids": ids, "labels": labels}, **call).draws == 1
