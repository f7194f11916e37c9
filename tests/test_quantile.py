"""The study that the coefficients of Gamma draws come from."""

import pytest

from bayesformer.attention import special
from bayesformer.study import quantile


def test_the_coefficients_are_those_that_the_study_finds(capsys):
    used = {3: special.THIRD, 4: special.FOURTH, 5: special.FIFTH, 6: special.SIXTH}
    found = quantile.coefficients()
    for (k, j), value in found.items():
        assert used[k][j // 2] == pytest.approx(value, abs=2e-5)
    assert sum(map(len, used.values())) == len(found)
    quantile.main()
    assert f"c^3: {special.THIRD[0]:.6f}" in capsys.readouterr().out
