"""Log gamma and Student's t law against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from topo_search.special import log_gamma, t_cdf, t_quantile


def test_log_gamma_is_scipys() -> None:
    x = np.concatenate([np.logspace(-9, 6, 4001), np.arange(1, 200, dtype=np.float64)]).reshape(-1, 2)
    assert log_gamma(x) == pytest.approx(special.gammaln(x), rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 47, 527, 20_000])
def test_students_t_is_scipys(degrees: int) -> None:
    for t in (-40.0, -3.0, -0.5, 0.0, 0.1, 0.99, 1.0, 2.5, 12.0, 300.0):
        assert t_cdf(degrees, t) == pytest.approx(special.stdtr(degrees, t), rel=1e-10, abs=1e-300)
    for probability in (0.51, 0.75, 0.95, 0.975, 0.9999):
        assert t_quantile(degrees, probability) == pytest.approx(special.stdtrit(degrees, probability), rel=1e-10)


def test_students_t_has_its_closed_forms() -> None:
    """One degree is the Cauchy law, two have an algebraic law."""
    assert t_cdf(1, 2.0) == pytest.approx(0.5 + math.atan(2.0) / math.pi, rel=1e-14)
    assert t_cdf(2, -3.0) == pytest.approx(0.5 - 3 / (2 * math.sqrt(11)), rel=1e-13)
    assert t_quantile(2, 0.975) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-13)
