"""Who made a figure: target, draft heads and decoding rule, as every artefact records them.

An artefact is used with another only when these agree. No torch here: the fingerprints are computed where the
weights are loaded (`target.fingerprint`, `heads.checkpoints`).
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from typing import Any

from topo_search.errors import InputError, MismatchError, is_whole, shown

NOISE = "philox4x32-10 gumbel 1"
TYPICAL = "typical"
BONUS = ("sampled", "greedy", "truncated")
EPSILON, DELTA = 0.09, 0.3  # Medusa's posterior_threshold and posterior_alpha; the paper ties delta to sqrt(epsilon)
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
        rule: `greedy`, `sample`, or `typical`, which changes the text (`decode.typical`).
        temperature: 0 for greedy.
        top_k, top_p, min_p: filters as transformers defines them, in this order after the temperature; null where off.
        seed: of the noise; null where nothing is drawn.
        noise: name and version of the noise; null where nothing is drawn.
        noise_share: weight of the same noise in the ranking of candidates; 0 ranks by the heads alone.
        epsilon, delta: of `typical`: a drafted token is taken where its target probability exceeds
            min(epsilon, delta * exp(-entropy)); null for other rules.
        bonus: of `typical`: the token after the accepted path is the best one (`greedy`), a draw (`sampled`), or a draw
            among the tokens above the threshold (`truncated`); null for other rules.

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
    epsilon: float | None = None
    delta: float | None = None
    bonus: str | None = None

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
        if self.rule == TYPICAL:
            _check_typical(self)
        elif (self.epsilon, self.delta, self.bonus) != (None, None, None):
            raise InputError("epsilon, delta and bonus belong to typical acceptance; leave them out, or ask for it.")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn with noise."""
        return self.temperature > 0 and self.bonus != "greedy"

    @property
    def changes_text(self) -> bool:
        """Whether the text is another one than plain decoding's, and so depends on the tree."""
        return self.rule == TYPICAL

    @property
    def of_plain_decoding(self) -> RuleIdentity:
        """The exact rule to set beside it: itself, or of typical acceptance the rule that chooses its bonus tokens."""
        if not self.changes_text:
            return self
        if self.bonus == "greedy":
            return GREEDY
        return replace(self, rule="sample", epsilon=None, delta=None, bonus=None)

    @property
    def in_words(self) -> str:
        """The rule and what it draws with, with the warning that a rule which changes the text always carries."""
        filters = {"top-k": self.top_k, "top-p": self.top_p, "min-p": self.min_p, "noise share": self.noise_share}
        at = ", ".join([f"temperature {self.temperature:g}", *(f"{k} {v:g}" for k, v in filters.items() if v)])
        if not self.changes_text:
            return f"{self.rule} acceptance at {at}"
        return (
            f"typical acceptance (changes the text) at {at}, epsilon {self.epsilon:g}, delta {self.delta:g}, "
            f"{self.bonus} bonus token"
        )


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
        InputError: a value is no number or out of range.
    """
    given = RuleIdentity(
        rule="sample",
        temperature=_number("temperature", temperature),
        top_k=None if top_k is None else _whole("top_k", top_k) or None,  # as in transformers, 0 is off
        top_p=None if top_p is None else _number("top_p", top_p),
        min_p=None if min_p is None else _number("min_p", min_p),
        seed=_whole("seed", seed),
        noise=NOISE,
        noise_share=_number("noise_share", noise_share),
    )
    if not given.samples:
        return GREEDY
    return replace(given, top_p=None if given.top_p == 1 else given.top_p, min_p=given.min_p or None)


def typical_rule(
    *,
    temperature: float,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    bonus: str = BONUS[0],
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
) -> RuleIdentity:
    """Typical acceptance (Medusa, section 2.3), which changes the text.

    At temperature 0 it is greedy, as in Medusa: the best token has probability 1, every other one 0.

    Raises:
        InputError: a value is out of range.
    """
    drawn = sampling_rule(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    base = drawn if drawn.samples else replace(drawn, temperature=1.0, seed=seed, noise=NOISE)  # to check the rest
    epsilon, delta = _number("epsilon", epsilon), _number("delta", delta)
    found = replace(base, rule=TYPICAL, epsilon=epsilon, delta=delta, bonus=bonus)
    if not drawn.samples:
        return GREEDY
    return replace(found, seed=None, noise=None) if bonus == "greedy" else found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InputError(f"{name} is {shown(value)}; it must be a number.")
    return float(value)


def _whole(name: str, value: Any) -> int:
    if not is_whole(value):
        raise InputError(f"{name} is {shown(value)}; it must be a whole number.")
    return int(value)


def _check_typical(rule: RuleIdentity) -> None:
    if rule.epsilon is None or not 0 < rule.epsilon < 1:
        raise InputError(f"epsilon is {rule.epsilon}; it must lie strictly between 0 and 1.")
    if rule.delta is None or not 0 < rule.delta < math.inf:
        raise InputError(f"delta is {rule.delta}; it must be above 0.")
    if rule.bonus not in BONUS:
        raise InputError(f"bonus is {rule.bonus!r}; it must be {', '.join(BONUS[:-1])} or {BONUS[-1]}.")
    if not rule.temperature > 0:
        raise InputError("typical acceptance at temperature 0 is greedy acceptance; give a temperature above 0.")
    if rule.noise_share:
        raise InputError(
            "noise_share helps to find the draw, which typical acceptance does not look for; leave it out."
        )


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
