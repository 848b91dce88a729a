"""Who made a figure: target, draft heads and decoding rule, as every artefact records them.

An artefact is used with another only when these agree. No torch here: the fingerprints are computed where the
weights are loaded (`target.fingerprint`, `heads.checkpoints`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from topo_search.errors import InputError, MismatchError

NOISE = "philox4x32-10 gumbel 1"
MAX_SEED = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """The target as loaded: `fingerprint` hashes its weights, `dtype` and `quantization` say how they are held."""

    name: str
    fingerprint: str
    dtype: str
    quantization: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsIdentity:
    """The draft heads: `fingerprint` hashes their tensors and shape, `num_heads` is the greatest depth they draft."""

    name: str
    kind: str
    fingerprint: str
    num_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleIdentity:
    """The decoding rule. Text, and so every rank, depends on all of it.

    Attributes:
        rule: `greedy` or `sample`.
        temperature: 0 for greedy.
        top_k, top_p, min_p: filters as transformers defines them, in this order after the temperature; null where off.
        seed: of the noise; null for greedy.
        noise: name and version of the noise; null for greedy.
        noise_share: weight of the same noise in the ranking of candidates; 0 ranks by the heads alone.

    Raises:
        InputError: a value is out of range; the message names it and the range.
    """

    rule: str = "greedy"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    noise: str | None = None
    noise_share: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; it must be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; it must be at least 1, or left out.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; it must lie between 0 and 1.")
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise InputError(f"seed is {self.seed}; it must lie between 0 and 2**63 - 1.")
        if not 0 <= self.noise_share < math.inf:
            raise InputError(f"noise_share is {self.noise_share}; it must be 0 or above.")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn with noise."""
        return self.temperature > 0


GREEDY = RuleIdentity()


def sampling_rule(
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    noise_share: float = 0.0,
) -> RuleIdentity:
    """The rule of these settings, equal for equal behaviour: temperature 0 is greedy, and neutral filters are none.

    Raises:
        InputError: a value is out of range.
    """
    given = RuleIdentity(
        rule="sample",
        temperature=float(temperature),
        top_k=None if top_k == 0 else top_k,  # as in transformers, 0 is off
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        noise=NOISE,
        noise_share=float(noise_share),
    )
    if not given.samples:
        return GREEDY
    return replace(given, top_p=None if given.top_p == 1 else given.top_p, min_p=given.min_p or None)


def recorded(rule: RuleIdentity) -> dict[str, Any]:
    """A rule as files hold it: rule, temperature and seed always, other settings where they are not neutral."""
    always = ("rule", "temperature", "seed")
    values = {field.name: getattr(rule, field.name) for field in fields(rule)}
    return {name: value for name, value in values.items() if name in always or value not in (None, 0.0)}


def require_same(what: str, given: Any, expected: Any, *, ignore: tuple[str, ...] = ("name",)) -> None:
    """Refuse two identities that differ in any field outside `ignore`.

    Raises:
        MismatchError: names every differing field with both values.
    """
    differing = differing_fields(given, expected, ignore=ignore)
    if differing:
        raise MismatchError(f"{what} does not fit: " + "; ".join(differing) + ".")


def differing_fields(given: Any, expected: Any, *, ignore: tuple[str, ...] = ("name",)) -> list[str]:
    """The fields in which two identities of one class differ, as `field is A, not B`."""
    return [
        f"{field.name} is {getattr(given, field.name)!r}, not {getattr(expected, field.name)!r}"
        for field in fields(expected)
        if field.name not in ignore and getattr(given, field.name) != getattr(expected, field.name)
    ]
