"""A generation on a terminal, token by token, coloured by how much the draws disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from bayesformer.generation.token_page import FULL
from bayesformer.generation.writing import Step

SHADES = ("", "on grey23", "yellow", "dark_orange", "bold red")
"""styles from certain to uncertain, in equal parts of the epistemic uncertainty that is shaded fully"""


class Streamer:
    """Prints the tokens of the first sequence as they come; give it to `Posterior.generate` as `on_step`.

    Text is printed once it cannot change any more: a token may be a part of a letter.
    """

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        self.tokenizer = tokenizer
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.tokens: list[int] = []
        self.printed = 0  # letters

    def __call__(self, step: Step, running: Tensor) -> None:
        """Print what a step has added."""
        if not bool(running[0]):
            return
        self.tokens.append(int(step.tokens[0]))
        written = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if written.endswith("�"):  # the rest of the letter is still to come
            return
        style = shade_of(float(step.values["epistemic"][0]))
        self.console.print(Text(written[self.printed :], style=style), end="")
        self.printed = len(written)


def shade_of(epistemic: float) -> str:
    """The style of a token with this epistemic uncertainty in nats."""
    return SHADES[min(len(SHADES) - 1, int(len(SHADES) * max(0.0, epistemic) / FULL))]


def read_model(path: str, gguf: str | None = None) -> tuple[Any, Any]:
    """A causal language model and its tokenizer from a folder of transformers, or from a GGUF file in it."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError("generate needs transformers: pip install 'bayesformer[hf]'.") from error
    if not Path(path).exists() and (path.startswith((".", "/", "~")) or path.endswith("/")):
        raise ValueError(f"model must be a folder of transformers; {path} does not exist.")
    options = {} if gguf is None else {"gguf_file": gguf}
    tokenizer = AutoTokenizer.from_pretrained(path, **options)
    return AutoModelForCausalLM.from_pretrained(path, **options), tokenizer
