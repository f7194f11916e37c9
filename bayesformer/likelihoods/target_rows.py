"""Which row of the targets a likelihood refuses, whatever the likelihood is."""

from __future__ import annotations

from torch import Tensor

from bayesformer.likelihoods.base import Likelihood


def check_rows(
    likelihood: Likelihood, outputs: Tensor, targets: Tensor, mask: Tensor | None = None, of: str = ""
) -> None:
    """`likelihood.check`, whose error also says in which row the first refused target is; `of` says rows of what."""
    try:
        likelihood.check(outputs, targets, mask)
    except ValueError as error:
        row = _first_refused(likelihood, outputs, targets, mask)
        if row is None:
            raise
        raise ValueError(f"{error} The first is in row {row}{of}.") from error


def _first_refused(likelihood: Likelihood, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> int | None:
    """The first row that is refused, by bisection; None where first and last are, as by a rule for all of them."""

    def refuses(begin: int, end: int) -> bool:
        own = None if mask is None else mask[begin:end]
        if not bool(likelihood.kept(targets[begin:end], own).any()):
            return False
        try:
            likelihood.check(outputs[begin:end], targets[begin:end], own)
        except ValueError:
            return True
        return False

    begin, end = 0, len(targets)
    if len(outputs) != end or end < 2 or (refuses(0, 1) and refuses(end - 1, end)):
        return None
    while end - begin > 1:
        middle = (begin + end) // 2
        begin, end = (begin, middle) if refuses(begin, middle) else (middle, end)
    return begin if refuses(begin, end) else None
