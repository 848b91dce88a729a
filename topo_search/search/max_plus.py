"""The max-plus convolution that the tree programmes share."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def convolved(
    first: Float[np.ndarray, " m"], second: Float[np.ndarray, " n"], length: int
) -> tuple[Float[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """best[k] = max over x of first[k - x] + second[x], and the smallest such x, for k below `length`.

    Args:
        first, second: worth by size; -inf where there is none.
        length: sizes wanted; fewer where both tables are short.
    """
    length = min(length, len(first) + len(second) - 1)
    padded = np.full((len(second), length), -np.inf)
    for x in range(min(len(second), length)):
        kept = min(len(first), length - x)
        padded[x, x : x + kept] = first[:kept] + second[x]
    split = padded.argmax(axis=0)
    return padded[split, np.arange(length)], split
