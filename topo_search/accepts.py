"""`AcceptTrace`: which nodes of a wide tree typical acceptance would take, at every step of a decode with that tree.

Typical acceptance changes the text, so the text and the places where steps start belong to the tree that recorded them
(`decode.typical`). A subtree is scored on these steps as if it had been there: exact at an answer's first step, an
approximation later. Decoding with the subtree itself gives its true figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from topo_search.errors import InputError, MismatchError
from topo_search.identity import HeadsIdentity, RuleIdentity, TargetIdentity, require_same
from topo_search.trace import TracePrompt
from topo_search.tree import Tree


@dataclass(frozen=True, kw_only=True)
class AcceptTrace:
    """Accept masks of every prompt's steps, prompt after prompt, steps in order.

    Attributes:
        prompts: the prompts in step order, with the answers that the wide tree wrote.
        tree: the wide tree.
        accepted: `[steps, nodes]`, whether each node of `tree.paths` and all its ancestors are acceptable.
        prompt_of_step: `[steps]`, index of each step's prompt.
        remaining: `[steps]`, N - 1 - j of each step: tokens that it and all later ones emit.
        target, heads, rule: what wrote and drafted; part of the identity, as is the tree.
        max_new_tokens: the cap of every answer; part of the identity.
        provenance: versions, command and time; not part of the identity.

    Raises:
        InputError: the rule is an exact one, or the arrays contradict the tree, the prompts or each other.
    """

    prompts: tuple[TracePrompt, ...]
    tree: Tree
    accepted: Bool[np.ndarray, "steps nodes"]
    prompt_of_step: Int[np.ndarray, " steps"]
    remaining: Int[np.ndarray, " steps"]
    target: TargetIdentity
    heads: HeadsIdentity
    rule: RuleIdentity
    max_new_tokens: int
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.rule.changes_text:
            raise InputError("Accept masks belong to typical acceptance; exact rules have a rank trace.")
        if not self.tree.paths:
            raise InputError("Accept masks need a tree with at least one node.")
        steps = len(self.prompt_of_step)
        if self.accepted.shape != (steps, self.tree.num_draft_nodes) or len(self.remaining) != steps:
            raise InputError(
                f"The accept masks have shape {self.accepted.shape}, but there are {steps} steps and "
                f"{self.tree.num_draft_nodes} nodes."
            )
        if len({prompt.id for prompt in self.prompts}) != len(self.prompts):
            raise InputError("The accept masks hold a prompt id twice.")
        parents = self.tree.parents[1:] - 1  # -1: the root, which the appended column stands for
        above = np.concatenate([self.accepted, np.ones((steps, 1), dtype=np.bool_)], axis=1)[:, parents]
        if np.any(self.accepted & ~above):
            raise InputError("The accept masks take a node whose parent they do not take.")
        if not np.array_equal(self.remaining, self._walked_remaining()):
            raise InputError("The accept masks' steps do not add up to their prompts' answers; record them again.")

    def _walked_remaining(self) -> Int[np.ndarray, " steps"]:
        """What `remaining` must be: each step leaves what it did not emit, and the last one leaves nothing."""
        impossible = np.full(len(self.remaining) + 1, -1, dtype=np.int64)
        steps = np.bincount(self.prompt_of_step, minlength=len(self.prompts))
        if np.any(np.diff(self.prompt_of_step) < 0) or len(steps) != len(self.prompts):
            return impossible
        if not np.array_equal(steps > 0, np.array([prompt.rows > 0 for prompt in self.prompts], dtype=np.bool_)):
            return impossible
        emitted = self.emitted(self.tree)
        last = np.append(self.prompt_of_step[1:] != self.prompt_of_step[:-1], True)[: len(emitted)]
        first = np.roll(last, 1)
        total = np.array([prompt.rows for prompt in self.prompts], dtype=np.int64)[self.prompt_of_step]
        wanted = np.where(first, total, np.roll(self.remaining - emitted, 1))
        checked: np.ndarray = np.where(last & (self.remaining != emitted), -1, wanted)
        return checked

    @property
    def contexts(self) -> Int[np.ndarray, " steps"]:
        """Committed tokens in the cache when each step starts."""
        whole = np.array([prompt.prompt_tokens + prompt.rows for prompt in self.prompts], dtype=np.int64)
        contexts: np.ndarray = whole[self.prompt_of_step] - self.remaining
        return contexts

    @cached_property
    def reach(self) -> Int[np.ndarray, "steps nodes"]:
        """What each step would emit if only the path to each node were in the tree: min(accepted + 1, remaining)."""
        depths = np.zeros((len(self.accepted), self.tree.num_draft_nodes + 1), dtype=np.int16)  # last: the root
        for node, parent in enumerate(self.tree.parents[1:] - 1):
            depths[:, node] = depths[:, parent] + self.accepted[:, node]
        reach: np.ndarray = np.minimum(depths[:, :-1] + 1, self.remaining[:, None]).astype(np.int16)
        return reach

    def emitted(self, tree: Tree) -> Int[np.ndarray, " steps"]:
        """What each recorded step would emit with a subtree of the wide tree.

        Raises:
            MismatchError: the tree has a node that the wide tree lacks.
        """
        missing = [path for path in tree.paths if path not in self.tree.slots]
        if missing:
            raise MismatchError(
                f"The tree has node {list(missing[0])}, which the tree of the accept masks lacks; record them with a "
                "wider tree."
            )
        nodes = [self.tree.slots[path] - 1 for path in tree.paths]
        found: np.ndarray = self.reach[:, nodes].max(axis=1, initial=1).astype(np.int64)
        return found

    def tokens_per_step(self, tree: Tree) -> float:
        """All emitted tokens over all steps on the recorded steps; 1.0 where no step is taken."""
        return float(self.emitted(tree).mean()) if len(self.prompt_of_step) else 1.0

    def select(self, keep: Callable[[TracePrompt], bool]) -> AcceptTrace:
        """The masks of the prompts that `keep` accepts."""
        kept = np.array([keep(prompt) for prompt in self.prompts], dtype=np.bool_)
        steps = kept[self.prompt_of_step]
        return replace(
            self,
            prompts=tuple(prompt for prompt, wanted in zip(self.prompts, kept, strict=True) if wanted),
            accepted=self.accepted[steps],
            prompt_of_step=(np.cumsum(kept) - 1)[self.prompt_of_step[steps]],
            remaining=self.remaining[steps],
        )

    def require_same_identity(self, other: AcceptTrace) -> None:
        """Refuse masks of another target, heads, rule, cap or tree.

        Raises:
            MismatchError: names what differs.
        """
        require_same("The other masks' target", other.target, self.target)
        require_same("The other masks' heads", other.heads, self.heads)
        require_same("The other masks' rule", other.rule, self.rule)
        for name in ("max_new_tokens", "tree"):
            if getattr(self, name) != getattr(other, name):
                raise MismatchError(f"The other masks do not fit: their {name} differs.")


def joined_accepts(parts: Sequence[AcceptTrace]) -> AcceptTrace:
    """The masks of several sets of prompts as one; a prompt recorded twice is kept once.

    Raises:
        MismatchError: the parts differ in identity.
    """
    first, known, kept = parts[0], set[str](), []
    for part in parts:
        first.require_same_identity(part)
        kept.append(part.select(lambda prompt, known=frozenset(known): prompt.id not in known))  # type: ignore[misc]
        known |= {prompt.id for prompt in part.prompts}
    offsets = np.cumsum([0, *(len(part.prompts) for part in kept)])
    return replace(
        first,
        prompts=tuple(prompt for part in kept for prompt in part.prompts),
        accepted=np.concatenate([part.accepted for part in kept]),
        prompt_of_step=np.concatenate([p.prompt_of_step + at for p, at in zip(kept, offsets, strict=False)]),
        remaining=np.concatenate([part.remaining for part in kept]),
    )
