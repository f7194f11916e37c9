"""Methods: the user's choice, as small frozen dataclasses, each turning a problem into a posterior.

`METHODS` is the list that the command line reads, `ADAPTER_METHODS` those for low-rank adapters alone, `EVERY_METHOD`
all that the runner takes.
A method's docstring starts with its one-line description; the text under a field is its help.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bayesformer.core.errors import unknown_name
from bayesformer.laplace.method import Laplace
from bayesformer.methods.averaging import Swag
from bayesformer.methods.combined import Combined
from bayesformer.methods.filtering import Ekf
from bayesformer.methods.hamiltonian_chains import Hmc, Nuts
from bayesformer.methods.layers import ConcreteDropout, MeanField
from bayesformer.methods.lora import Blob, Tfb
from bayesformer.methods.points import Ensemble, Map, MCDropout, Mle
from bayesformer.methods.sampling import Baoab, Psgld, Sghmc, Sgld, Sgnht
from bayesformer.methods.stochastic_attention import Attention
from bayesformer.methods.temperature_scaling import TemperatureScaling
from bayesformer.methods.variational_weights import Ivon, Vi
from bayesformer.train.problem import Method, Problem

__all__ = [
    "ADAPTER_METHODS",
    "EVERY_METHOD",
    "METHODS",
    "Attention",
    "Baoab",
    "Blob",
    "Combined",
    "ConcreteDropout",
    "Ekf",
    "Ensemble",
    "Hmc",
    "Ivon",
    "Laplace",
    "MCDropout",
    "Map",
    "MeanField",
    "Method",
    "Mle",
    "Nuts",
    "Problem",
    "Psgld",
    "Sghmc",
    "Sgld",
    "Sgnht",
    "Swag",
    "TemperatureScaling",
    "Tfb",
    "Vi",
    "build_method",
]

METHODS: dict[str, type[Any]] = {
    "mle": Mle,
    "map": Map,
    "ensemble": Ensemble,
    "mc_dropout": MCDropout,
    "mean_field": MeanField,
    "concrete_dropout": ConcreteDropout,
    "attention": Attention,
    "combined": Combined,
    "sgld": Sgld,
    "psgld": Psgld,
    "sghmc": Sghmc,
    "sgnht": Sgnht,
    "baoab": Baoab,
    "hmc": Hmc,
    "nuts": Nuts,
    "vi": Vi,
    "ivon": Ivon,
    "swag": Swag,
    "ekf": Ekf,
    "laplace": Laplace,
}

ADAPTER_METHODS: dict[str, type[Any]] = {"blob": Blob, "tfb": Tfb}
"""Methods for models with LoRA adapters of PEFT; they refuse others."""

EVERY_METHOD: dict[str, type[Any]] = METHODS | ADAPTER_METHODS | {"temperature_scaling": TemperatureScaling}
"""What experiments can name: also those that need adapters, or validation data."""


def build_method(name: str, settings: dict[str, Any] | None = None) -> Method:
    """A method from its name and settings."""
    if name not in EVERY_METHOD:
        raise unknown_name("method", name, EVERY_METHOD)
    kind = EVERY_METHOD[name]
    known = [f.name for f in fields(kind)]
    for key in settings or {}:
        if key not in known:
            raise unknown_name(f"setting of {name}", key, known)
    return kind(**(settings or {}))
