"""Logits processors: which of them a tree decoder can honour.

The walk over a verified tree asks a processor once per emitted token, with the sequence and the scores that plain
decoding would give it, so whatever depends on these alone is safe on any path. Typical acceptance asks along several
paths, each with its own text, so it takes stateless ones only. What runs a model of its own, reads an
encoder, or needs several rows at once is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from topo_search.errors import InputError

_REFUSED = {
    "ClassifierFreeGuidanceLogitsProcessor": "it needs conditional and unconditional rows side by side",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it runs the model itself, with a cache of its own",
    "EncoderNoRepeatNGramLogitsProcessor": "it reads an encoder's input",
    "EncoderRepetitionPenaltyLogitsProcessor": "it reads an encoder's input",
    "HammingDiversityLogitsProcessor": "it needs groups of beams",
    "PrefixConstrainedLogitsProcessor": "it counts beams",
    "SynthIDTextWatermarkLogitsProcessor": "its state starts with a batch, not with a sequence",
}


def path_safe(processors: Iterable[Any] | None) -> tuple[Any, ...]:
    """The processors in their order, each fit to be called node by node.

    Raises:
        InputError: they are no list, or one is not callable, or cannot be honoured; the message names it and the cause.
    """
    if processors is not None and not isinstance(processors, Iterable):
        raise InputError(f"Logits processors come in a list, and {type(processors).__name__} is none; put it into one.")
    found = tuple(processors or ())
    for processor in found:
        name = type(processor).__name__
        if not callable(processor):
            raise InputError(f"Logits processor {name} is not callable; give objects called with (input_ids, scores).")
        if name in _REFUSED:
            raise InputError(f"Logits processor {name} cannot be applied along a tree's paths: {_REFUSED[name]}.")
    return found


def require_stateless(processors: Iterable[Any], who: str, way_out: str) -> None:
    """Refuse what may keep a state: transformers' own processors read their arguments only, of others nothing is known.

    Raises:
        InputError: names the first such processor, who would share its state, and the way out.
    """
    for processor in processors:
        if not type(processor).__module__.startswith("transformers.generation"):
            raise InputError(f"Logits processor {type(processor).__name__} may keep a state that {who}; {way_out}.")
