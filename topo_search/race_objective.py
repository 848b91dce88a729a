"""The measured objective of a study: a tree's end-to-end race against the seed tree, through the decoder.

Value: how many times as fast as the seed, paired pass by pass, so a slow spell of the machine strikes both. Every
pass runs all prompts, each distinct, with a cache that starts empty; first passes warm up and are not counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from topo_search.calibrate import EncodedPrompt
from topo_search.compare import divergence
from topo_search.decode.decoder import Decoded, TreeDecoder
from topo_search.errors import CheckError, InputError
from topo_search.heads.base import DraftHeads
from topo_search.search.intervals import t_quantile
from topo_search.search.study import Report
from topo_search.target.adapter import Target
from topo_search.tree import Tree

_WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class RaceObjective:
    """Races trees against `seed` on the same prompts.

    Attributes:
        target, heads: what decodes.
        prompts: at least one; their token ids must be distinct.
        seed: the tree to beat.
        max_new_tokens: cap of every answer.
        repeats: passes over all prompts per tree.

    Raises:
        InputError: a prompt is given twice, or there is none.
        CheckError: the start-up probe failed.
    """

    target: Target
    heads: DraftHeads
    prompts: Sequence[EncodedPrompt]
    seed: Tree
    max_new_tokens: int
    repeats: int
    _decoder: TreeDecoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.prompts or len({prompt.tokens for prompt in self.prompts}) != len(self.prompts):
            raise InputError("A race needs prompts that differ: a repeated prompt would count the same answer twice.")
        object.__setattr__(self, "_decoder", self._decoder_of(self.seed, run_probe=True))

    def __call__(self, tree: Tree, report: Report) -> float:
        """Median over passes of the tree's tokens per second over the seed's.

        Raises:
            CheckError: a text differs from the seed's, and no near-tie explains it.
        """
        if tree == self.seed:
            return 1.0
        ratios: list[float] = []
        rival = self._decoder_of(tree, run_probe=False)
        self._warm_up(rival)
        for number in range(self.repeats):
            ratios.append(self._pass_over(rival, number))
            report(number, statistics.median(ratios))
        return statistics.median(ratios)

    def ceiling(self, tree: Tree) -> float | None:
        """Nothing is known without running it."""
        del tree
        return None

    def confirmed(self, tree: Tree) -> tuple[bool, list[float]]:
        """Race a study's winner against the seed again: whether it is faster beyond doubt, and the new ratios.

        The winner of many noisy measurements looks better than it is; only fresh passes decide, by the lower end of
        a 95 % interval of the mean log ratio.
        """
        if tree == self.seed:
            return False, []
        rival = self._decoder_of(tree, run_probe=False)
        self._warm_up(rival)
        ratios = [self._pass_over(rival, number) for number in range(max(self.repeats, 3))]
        logs = [math.log(ratio) for ratio in ratios]
        half = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        return statistics.fmean(logs) - half > 0, ratios

    def _pass_over(self, rival: TreeDecoder, number: int) -> float:
        """One pass over all prompts; who answers first alternates."""
        mine: list[Decoded] = []
        theirs: list[Decoded] = []
        for index, prompt in enumerate(self.prompts):
            turns = [(rival, mine), (self._decoder, theirs)]
            for decoder, answers in turns if (index + number) % 2 == 0 else reversed(turns):
                answers.append(decoder.generate(prompt.tokens, max_new_tokens=self.max_new_tokens))
            self._require_equal_text(prompt, theirs[-1], mine[-1])
        rates = [_tokens_per_ms(answers) for answers in (mine, theirs)]
        if not all(rates):
            raise InputError("Every answer of the race is one token long, so no step is taken; give other prompts.")
        return rates[0] / rates[1]

    def _warm_up(self, rival: TreeDecoder) -> None:
        for decoder in (rival, self._decoder):
            decoder.generate(self.prompts[0].tokens, max_new_tokens=min(_WARM_UP_TOKENS, self.max_new_tokens))

    def _require_equal_text(self, prompt: EncodedPrompt, expected: Decoded, found: Decoded) -> None:
        point = divergence(self.target, prompt.id, prompt.tokens, expected.tokens, found.tokens)
        if point is not None and not point.near_tie:
            raise CheckError(
                f"The text of {prompt.id} differs between two trees at token {point.position}, two best logits "
                f"{point.gap:.2g} apart; a tree must not change the text."
            )

    def _decoder_of(self, tree: Tree, *, run_probe: bool) -> TreeDecoder:
        capacity = max(len(prompt.tokens) for prompt in self.prompts) + self.max_new_tokens
        return TreeDecoder(self.target, self.heads, tree, capacity=capacity, run_probe=run_probe)


def _tokens_per_ms(answers: Sequence[Decoded]) -> float:
    """What follows the first token, over the time it took."""
    return sum(len(run.tokens) - 1 for run in answers) / max(sum(run.decode_ms for run in answers), 1e-9)
