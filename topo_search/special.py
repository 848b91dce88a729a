"""Log gamma on arrays and Student's t law, so that `optimize` need not wait for scipy.special to be imported.

Accurate to about 1e-13, a probability of t to 1e-10; see tests/unit/test_special.py.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from jaxtyping import Float

# of Stirling's series for log gamma: B_2k / (2k (2k - 1)), Abramowitz and Stegun 6.1.41
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_SHIFT = 8  # the series is used from here on, where its next term is below 1e-14
_TINY, _CONVERGED = 1e-300, 2.3e-16


def log_gamma(x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Logarithm of the gamma function of positive numbers."""
    y = x + _SHIFT
    outer = x * (x + 7)
    below = outer * (outer + 6) * (outer + 10) * (outer + 12)  # x (x + 1) .. (x + 7) = gamma(x + 8) / gamma(x)
    inverse = 1 / y
    square = inverse * inverse
    series = np.full_like(y, _STIRLING[-1])
    for term in reversed(_STIRLING[:-1]):
        series *= square
        series += term
    found: np.ndarray = (y - 0.5) * np.log(y) - y + 0.5 * math.log(2 * math.pi) + series * inverse - np.log(below)
    return found


def t_cdf(degrees: int, t: float) -> float:
    """Probability that Student's t with so many degrees of freedom is at most `t`."""
    tail = 0.5 * _incomplete_beta(0.5 * degrees, 0.5, float(degrees), t * t)
    return tail if t < 0 else 1 - tail


@cache
def t_quantile(degrees: int, probability: float) -> float:
    """The value that Student's t stays below with a probability above 0.5 and below 1."""
    low, high = 0.0, 1.0
    while t_cdf(degrees, high) < probability:
        low, high = high, 2 * high
    t = high
    for _ in range(200):  # Newton, kept inside a bracket that bisection narrows
        error = t_cdf(degrees, t) - probability
        low, high = (low, t) if error > 0 else (t, high)
        step = t - error / _t_density(degrees, t)
        following = step if low < step < high else (low + high) / 2
        if abs(following - t) <= 4 * _CONVERGED * t:
            break
        t = following
    return t


def _t_density(degrees: int, t: float) -> float:
    scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return math.exp(scale - (degrees + 1) / 2 * math.log1p(t * t / degrees))


def _incomplete_beta(a: float, b: float, above: float, below: float) -> float:
    """The regularised incomplete beta function at x = above / (above + below), which keeps both x and 1 - x exact."""
    x, rest = above / (above + below), below / (above + below)
    if rest == 0:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, rest) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function by Lentz's method (Numerical Recipes, section 6.4)."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 10_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / _not_zero(1 + factor * d), _not_zero(1 + factor / c)
            value *= c * d
        if abs(c * d - 1) < _CONVERGED:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
