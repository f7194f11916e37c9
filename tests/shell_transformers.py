"""Transformers and PEFT models with small configurations, as cases for a shell."""

import torch
from torch import nn

from tests.shell_zoo import Case

SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def _ids(n=3, t=7):
    ids = torch.randint(2, 30, (n, t))
    mask = torch.ones_like(ids)
    mask[0, t - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _bert(**more):
    import transformers

    config = transformers.BertConfig(**SMALL, intermediate_size=32, num_labels=3, max_position_embeddings=16, **more)
    return transformers.BertForSequenceClassification(config)


def _llama(**more):
    import transformers

    settings = {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1, "pad_token_id": 0, **more}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))


def bert():
    return Case(_bert(), _ids())


def bert_head():
    return Case(_bert(), _ids(), "classifier*")


def bert_attentions():
    return Case(_bert(attn_implementation="eager"), {**_ids(), "output_attentions": True, "return_dict": True})


def bert_checkpointing():
    model = _bert()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Case(model, _ids())


def bert_tuple():
    return Case(_bert(), {**_ids(), "return_dict": False})


def _gpt2():
    import transformers

    config = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def gpt2():
    return Case(_gpt2(), {**_ids(), "use_cache": False})


def gpt2_by_alias():
    return Case(_gpt2(), _ids(), "lm_head*")


def t5():
    import transformers

    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    return Case(model, {**_ids(), "decoder_input_ids": torch.randint(2, 30, (3, 4))})


def llama():
    return Case(_llama(), _ids())


def llama_tied():
    return Case(_llama(tie_word_embeddings=True), _ids())


def llama_head():
    return Case(_llama(), {**_ids(), "use_cache": True}, "lm_head*")


def _image_settings():
    return {"image_size": 8, "num_channels": 1, "num_labels": 3}


def vit():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, patch_size=4, **_image_settings())
    return Case(transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 1, 8, 8)})


def swin():
    import transformers

    config = transformers.SwinConfig(
        embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=2, patch_size=2, **_image_settings()
    )
    return Case(transformers.SwinForImageClassification(config), {"pixel_values": torch.randn(2, 1, 8, 8)})


def resnet():
    import transformers

    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    return Case(transformers.ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 1, 16, 16)})


def mixtral():
    import transformers

    settings = {**SMALL, "intermediate_size": 16, "num_key_value_heads": 1, "num_local_experts": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings, pad_token_id=0))
    return Case(model, _ids(), exact=False)


def _adapted(config, model=None):
    import peft

    adapted = peft.get_peft_model(model or _bert(), config)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:  # zero at first: nothing would answer to A
            nn.init.normal_(p, std=0.1)
    return adapted


def _lora_config(**more):
    import peft

    return peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS", **more)


def lora():
    return Case(_adapted(_lora_config()), _ids())


def lora_by_pattern():
    return Case(_adapted(_lora_config()), _ids(), "*lora*")


def dora():
    return Case(_adapted(_lora_config(use_dora=True)), _ids())


def rs_lora():
    return Case(_adapted(_lora_config(use_rslora=True)), _ids())


def two_adapters():
    model = _adapted(_lora_config())
    model.add_adapter("other", _lora_config())
    model.set_adapter("other")
    return Case(model, _ids())


def ia3():
    import peft

    config = peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[], task_type="SEQ_CLS")
    return Case(_adapted(config), _ids())


def prompt():
    import peft

    return Case(_adapted(peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)), _ids())


def _half(model):
    """A base in bfloat16 whose inferred weights stay float32, as PEFT makes it."""
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.bfloat16()
    return model


def half_base_with_adapter():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return Case(_half(_adapted(config, _llama())), _ids())


def dispatched():
    """Hooks of accelerate around every module."""
    import accelerate

    return Case(accelerate.dispatch_model(_bert(), {"": "cpu"}, force_hooks=True), _ids())


def static_cache():
    import transformers

    model = _llama()
    cache = transformers.StaticCache(model.config, max_cache_len=16)
    model.kept = cache  # an object with tensors among the attributes
    return Case(model, _ids())


def reentrant_checkpointing():
    model = _bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return Case(model, _ids())


CASES = {
    make.__name__: make
    for make in (
        bert, bert_head, bert_attentions, bert_checkpointing, bert_tuple, gpt2, gpt2_by_alias, t5, llama, llama_tied,
        llama_head, vit, swin, resnet, mixtral, lora, lora_by_pattern, dora, rs_lora, two_adapters, ia3, prompt,
        half_base_with_adapter, dispatched, static_cache, reentrant_checkpointing,
    )
}  # fmt: skip
