"""Every family of attention there is, by name, for contract tests; a new family adds its rows."""

from bayesformer.attention import (
    Contextual,
    DataDependent,
    Dirichlet,
    GaussianLogits,
    Learned,
    Lognormal,
    RowNetwork,
    Softmax,
    Weibull,
)

B, H, T, S, d = 3, 2, 5, 6, 4

DETERMINISTIC = {"softmax": Softmax}
STOCHASTIC = {
    "gaussian": lambda: GaussianLogits(Learned(0.3, H)),
    "gaussian per position": lambda: GaussianLogits(Learned(0.3, H, length=8)),
    "gaussian dd": lambda: GaussianLogits(DataDependent(0.3, 4)),
    "gaussian dd rows": lambda: GaussianLogits(RowNetwork(0.3, 8, 4)),
    "dirichlet": lambda: Dirichlet(Learned(3.0, H, per_row=True)),
    "dirichlet per position": lambda: Dirichlet(Learned(3.0, H, length=8, per_row=True)),
    "dirichlet dd": lambda: Dirichlet(DataDependent(3.0, 4, per_row=True)),
    "dirichlet dd rows": lambda: Dirichlet(RowNetwork(3.0, 8, 4, per_row=True)),
    "dirichlet symmetric": lambda: Dirichlet(Learned(3.0, H, per_row=True), 0.5, symmetric=True),
    "dirichlet gamma": lambda: Dirichlet(Learned(3.0, H, per_row=True), divergence="gamma"),
    "dirichlet surrogate": lambda: Dirichlet(Learned(0.5, H, per_row=True), gradient="surrogate"),
    "weibull": lambda: Weibull(3.0, 0.5, 0.7),
    "weibull contextual": lambda: Weibull(3.0, beta=0.7, contextual=Contextual(d, 3)),
    "lognormal": lambda: Lognormal(0.5, 0.2, 0.8),
    "lognormal contextual": lambda: Lognormal(0.5, prior_sigma=0.8, contextual=Contextual(d, 3)),
}
FAMILIES = {**DETERMINISTIC, **STOCHASTIC}

# What the papers used and beyond: k from 1 to 2000, sharpness from 1e-3 to 1e4, priors of 1e-15.
EXTREME = {
    "weibull k=1": lambda: Weibull(1.0, 1e-15, 1e-10),
    "weibull k=2000": lambda: Weibull(2000.0, 1e-7, 1e-15),
    "weibull beta=1": lambda: Weibull(10.0, 1.0, 1.0),
    "weibull contextual k=1": lambda: Weibull(1.0, beta=1e-15, contextual=Contextual(d, 1)),
    "lognormal wide": lambda: Lognormal(3.0, 0.0, 1e-2),
    "lognormal narrow": lambda: Lognormal(1e-15, 0.0, 1e15),
    "lognormal contextual": lambda: Lognormal(1e-15, prior_sigma=1e15, contextual=Contextual(d, 1)),
    "gaussian narrow": lambda: GaussianLogits(Learned(1e-15, H), 1e-15),
    "gaussian wide": lambda: GaussianLogits(Learned(30.0, H), 1e-3),
    "dirichlet flat": lambda: Dirichlet(Learned(1e-3, H, per_row=True), 10.0),
    "dirichlet sharp": lambda: Dirichlet(Learned(1e4, H, per_row=True), 1e-3),
    "dirichlet flat prior": lambda: Dirichlet(Learned(1.0, H, per_row=True), 1e-15),
    "dirichlet symmetric": lambda: Dirichlet(Learned(1e-3, H, per_row=True), 1e-15, symmetric=True),
    "dirichlet symmetric sharp": lambda: Dirichlet(Learned(1e4, H, per_row=True), 1e3, symmetric=True),
    "dirichlet surrogate flat": lambda: Dirichlet(Learned(1e-3, H, per_row=True), gradient="surrogate"),
    "dirichlet surrogate sharp": lambda: Dirichlet(Learned(1e4, H, per_row=True), gradient="surrogate"),
}
