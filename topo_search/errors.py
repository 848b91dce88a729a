"""The errors a user can meet, nothing else is raised on purpose; and what their messages share.

TopoSearchError
├── InputError          bad input: the thing, the rule and the way out (exit code 2)
│   └── MismatchError   two artefacts that do not belong together (exit code 2)
└── CheckError          a promise did not hold at run time: text, counts or logits differ (exit code 1)
"""

from __future__ import annotations

import numbers
from typing import Any


class TopoSearchError(Exception):
    """Root of every error that topo-search raises on purpose."""


class InputError(TopoSearchError):
    """Something given by the user breaks a rule that the message names, with the way out."""


class MismatchError(InputError):
    """Artefacts made from different targets, heads, rules or devices were put together."""


class CheckError(TopoSearchError):
    """A run contradicted what it promised: lossless text, replayed counts or independent logits."""


def shown(value: Any) -> str:
    """A value as it may stand in a message: never long, on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, of numpy too; True and 2.0 are none."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))
