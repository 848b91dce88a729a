"""Who made a figure: target, draft heads and decoding rule, as every artefact records them.

An artefact is used with another only when these agree. No torch here: the fingerprints are computed where the
weights are loaded (`target.fingerprint`, `heads.checkpoints`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from topo_search.errors import MismatchError


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
    """The acceptance rule. Text, and so every rank, depends on all of it."""

    rule: str = "greedy"
    temperature: float = 0.0
    seed: int | None = None


GREEDY = RuleIdentity()


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
