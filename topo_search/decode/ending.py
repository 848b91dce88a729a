"""When an answer is over: end-of-text, a stop string, the cap, or the target's last position.

One object decides it for every way of decoding, token by token, so that an end inside an accepted path cuts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from topo_search.errors import InputError

_MARGIN = 4  # tokens before a stop string's first one: their bytes may belong to one character


@dataclass(frozen=True, slots=True, kw_only=True)
class StopStrings:
    """Texts that end an answer once it holds one of them, wherever the borders of tokens fall.

    Attributes:
        strings: none empty.
        tokenizer: decodes the answer.

    Raises:
        InputError: a string is empty, or there is no tokenizer.
    """

    strings: tuple[str, ...]
    tokenizer: Any

    def __post_init__(self) -> None:
        """Check both."""
        if self.tokenizer is None:
            raise InputError("Stop strings need a tokenizer, and this target has none; load it with its tokenizer.")
        if not all(self.strings):
            raise InputError("A stop string is empty; leave it out.")

    def completed_by_last(self, answer: Sequence[int]) -> bool:
        """Whether the answer's last token completes a stop string; only its tail is decoded."""
        longest = max((len(string.encode()) for string in self.strings), default=0)
        tail: str = self.tokenizer.decode(list(answer[-(longest + _MARGIN) :]), skip_special_tokens=False)
        return any(string in tail for string in self.strings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What ends one answer.

    Attributes:
        prompt_tokens: of the prompt.
        max_new_tokens: exact cap of the answer.
        position_limit: positions of the target, or None.
        eos_token_ids: ids that end it.
        stops: texts that end it, or None.
    """

    prompt_tokens: int
    max_new_tokens: int
    position_limit: int | None
    eos_token_ids: frozenset[int]
    stops: StopStrings | None = None

    def reason(self, text: Sequence[int]) -> str | None:
        """Why the answer ends with the last token of `text`, prompt and answer: `eos`, `stop`, `cap`, `limit`."""
        if text[-1] in self.eos_token_ids:
            return "eos"
        if self.stops is not None and self.stops.completed_by_last(text[self.prompt_tokens :]):
            return "stop"
        if len(text) - self.prompt_tokens >= self.max_new_tokens:
            return "cap"
        return "limit" if self.position_limit is not None and len(text) >= self.position_limit else None
