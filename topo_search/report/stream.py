"""Text as it is written: pieces that never show half a character, questions, and the closing line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from topo_search.stats import DecodeStats

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes of an unfinished character decode to


@dataclass(slots=True)
class TextPieces:
    """Turns tokens into text piece by piece; a character whose bytes are spread over tokens waits for its last one."""

    decode: Callable[[Sequence[int]], str]
    tokens: list[int] = field(default_factory=list)
    shown: str = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens finish."""
        self.tokens += tokens
        text = self.decode(self.tokens)
        return "" if text.endswith(_UNFINISHED) else self._beyond(text)

    def rest(self) -> str:
        """What is left at the end, an unfinished character included."""
        return self._beyond(self.decode(self.tokens))

    def _beyond(self, text: str) -> str:
        piece, self.shown = text[len(self.shown) :], text
        return piece


def write_piece(console: Console, piece: str) -> None:
    """Write a piece where the last one ended, as it is: rich would expand its tabs."""
    console.file.write(piece)
    console.file.flush()


def ask(console: Console) -> str | None:
    """The user's next turn, or None at the end of the input."""
    try:
        return console.input("[bold]you:[/bold] ")
    except EOFError:
        return None


def summary(stats: DecodeStats, tokens: int, seconds: float) -> str:
    """Tokens per step and speed of one answer, the first token aside."""
    rate = f", {(tokens - 1) / seconds:.1f} tokens/s" if tokens > 1 and seconds > 0 else ""
    return (
        f"{tokens} tokens, the first by the prompt's own pass, the others in {stats.steps} steps: "
        f"{stats.tokens_per_step:.2f} tokens per step ({stats.accepted_per_step:.2f} accepted drafts){rate}; "
        f"steps that accepted 0, 1, 2, ... drafts: {list(stats.histogram)}"
    )
