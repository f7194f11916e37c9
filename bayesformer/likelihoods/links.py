"""Class probabilities from a Gaussian over logits f ~ N(m, V), V = diag + factor factorᵀ per question.

"mc" averages the softmax of draws: right in the limit of many, and the only link that keeps the draws, so that the
uncertainty splits into aleatoric and epistemic. "probit" and "bridge" are closed forms with one component: they say
how uncertain a prediction is, not why, and their epistemic part reads 0. Nothing here is C by C.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesformer.core.errors import unknown_name
from bayesformer.core.types import GaussianOutputs

Link: TypeAlias = Literal["mc", "probit", "bridge", "bridge_norm"]
LINKS: tuple[Link, ...] = ("mc", "probit", "bridge", "bridge_norm")
"""All links for classes; a yes-or-no target has "mc" and "probit"."""


def check_link(link: str | None, allowed: tuple[Link, ...] = LINKS) -> None:
    """Refuse a link that does not exist or does not fit."""
    if link is not None and link not in LINKS:
        raise unknown_name("link", link, LINKS)
    if link is not None and link not in allowed:
        raise ValueError(f"link must be {' or '.join(map(repr, allowed))} for this likelihood; got {link!r}.")


def log_probs(outputs: GaussianOutputs, link: Link) -> Tensor:
    """(B, ..., C): log class probabilities by a closed form."""
    if link == "probit":
        return probit(outputs)
    return bridge(outputs, normalise=link == "bridge_norm")


def probit(outputs: GaussianOutputs) -> Tensor:
    """log softmax(m_k / √(1 + π/8 V_kk)): MacKay's formula, class by class.

    It looks at variances alone, so it is not blind to a shift common to all logits as softmax is.
    """
    return shrink(outputs.mean, outputs.variance).log_softmax(-1)


def binary_probit(outputs: GaussianOutputs) -> Tensor:
    """(B, ..., 2): log probabilities of no and yes from one logit each."""
    logits = shrink(outputs.mean, outputs.variance)
    return torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)


def shrink(mean: Tensor, variance: Tensor) -> Tensor:
    """m / √(1 + π/8 v): the logit whose sigmoid is close to the average sigmoid of N(m, v)."""
    return mean / (1 + math.pi / 8 * variance).sqrt()


def bridge(outputs: GaussianOutputs, normalise: bool = False) -> Tensor:
    """The mean of the Dirichlet law that the Laplace bridge puts beside N(m, V), as log probabilities.

        α_k = (1 - 2/C + e^{m_k} Σ_j e^{-m_j} / C²) / V_kk,   p = α / Σ α

    after m and V are projected on logits that sum to 0. With `normalise`, V is first brought to the size for
    which the bridge was made, c = mean_k V_kk / √(C/2): m / √c, V / c. Everything stays in logarithms, since e^{m}
    overflows for confident networks. Where V has no part that softmax can see, the answer is softmax(m).
    """
    classes = outputs.mean.shape[-1]
    mean, variance, blind = _sum_to_zero(outputs)
    if normalise:
        size = variance.mean(-1, keepdim=True) / math.sqrt(classes / 2)
        size = size.masked_fill(blind, 1.0)
        mean, variance = mean / size.sqrt(), variance / size
    spread = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(classes)
    constant = math.log(1 - 2 / classes) if classes > 2 else -math.inf
    log_alpha = torch.logaddexp(spread, spread.new_tensor(constant)) - variance.masked_fill(blind, 1.0).log()
    return torch.where(blind, outputs.mean, log_alpha).log_softmax(-1)


def _sum_to_zero(outputs: GaussianOutputs) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variances given that the logits sum to 0, and where nothing is left of V, (B, ..., 1)."""
    mean, before = outputs.mean, outputs.variance
    sums = outputs.diagonal  # V 1
    if outputs.factor is not None:
        sums = sums + (outputs.factor @ outputs.factor.sum(-2, keepdim=True).mT).squeeze(-1)
    total = sums.sum(-1, keepdim=True)  # 1ᵀ V 1
    largest = before.amax(-1, keepdim=True)
    rounding = torch.finfo(mean.dtype).eps * mean.shape[-1]
    inside = total <= rounding * largest  # V has no common direction to remove
    share = torch.where(inside, torch.zeros_like(sums), sums / total.masked_fill(inside, 1.0))
    mean = mean - share * mean.sum(-1, keepdim=True)
    after = before - share * sums
    # Below this the difference is rounding: it must not become a huge α.
    variance = torch.maximum(after, rounding * largest)
    return mean, variance, after.amax(-1, keepdim=True) <= rounding * largest
