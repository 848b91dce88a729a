"""The answer in words: what to use, by how much, how sure, and for what that holds."""

from __future__ import annotations

from topo_search.search.among import Among, Standing
from topo_search.search.assess import Assessment, Assumptions
from topo_search.search.choose import Settings
from topo_search.search.intervals import Figure
from topo_search.search.optimize import PLAIN, TREE


def verdict(found: Assessment) -> str:
    """What to use and why, in a few sentences."""
    return f"{_what(found)} {scope(found.assumptions)}"


def heads_verdict(among: Among) -> str:
    """Which heads to use, by how much, how sure."""
    names, best = [standing.name for standing in among.standings], among.best
    if best.found.recommended == PLAIN:
        return f"Of {', '.join(names)}, no heads beat plain decoding here."
    of_steps = best.found.result.settings.objective == "tokens-per-step"
    what = "Heads of most tokens per step" if of_steps else "Fastest heads"
    others = [_over(best, other, of_steps=of_steps) for other in among.standings if other is not best]
    return f"{what}: {best.name} with the {best.found.recommended}: {'; '.join(others)}."


def scope(held: Assumptions) -> str:
    """Batch, context, rule and temperature that the verdict holds for."""
    words = [_batches(held)]
    if held.contexts is not None:
        words.append(f"contexts of {held.contexts[0]} to {held.contexts[1]} tokens")
    if held.measured_contexts is not None:
        weights = dict(held.context_weights or ())
        shown = [
            f"{context} (weight {weights[context]:g})" if weights else str(context)
            for context in held.measured_contexts
        ]
        words.append(f"timed at {', '.join(shown)}")
    if held.rule is not None:
        words.append(held.rule.in_words)
    return f"Holds for {', '.join(words)}."


def _batches(held: Assumptions) -> str:
    served = dict(held.batch_weights or {held.batch or 1: 1.0})
    total = sum(served.values())
    shares = {batch: weight / total for batch, weight in sorted(served.items()) if weight}
    words = [
        f"batch {batch}" + (f" for {100 * share:.3g} % of the tokens" if held.batch_weights else "")
        for batch, share in shares.items()
    ]
    return " and ".join(words) + (", every row still being written" if max(shares) > 1 else "")


def basis(held: Assumptions, settings: Settings) -> str:
    """The assumptions in one line, with what was asked of the search."""
    caps = {"max depth": settings.max_depth, "max rank": settings.max_rank}
    asked = [f"rule {settings.rule}", f"refine {settings.refine}"]
    asked += [f"{name} {cap}" for name, cap in caps.items() if cap is not None]
    prompts = "" if held.prompts is None else f"{held.prompts} prompts, {held.positions} positions, "
    return (
        f"Assumes: estimator {held.estimator}; {held.law}; {prompts}{held.split}; "
        f"{', '.join(asked)}; pick {held.pick}; seed {held.seed}, {held.resamples} resamples."
    )


def _what(found: Assessment) -> str:
    result, name = found.result, found.recommended
    if result.settings.objective == "tokens-per-step":
        return _asked_for(found)
    if name == PLAIN and not result[TREE].tree.paths:
        return (
            "Recommended: plain decoding; no tree could be tried: no other width within the budget has a time, or "
            "no draft any probability. Raise --budget, or run topo-search measure for more widths."
        )
    if name == PLAIN:
        return f"Recommended: plain decoding{_against(found)}. No tree or chain of these heads earns its cost here."
    tree = result[name].tree
    nodes = f"{name}, {tree.num_draft_nodes} draft node{'s' if tree.num_draft_nodes != 1 else ''}"
    if found.over_plain is None:
        how = "by its own score" if found.assumptions.prompts is not None else "as the accuracies let expect"
        return f"Recommended: {nodes}, {result[name].speedup or 0:.2f} times plain decoding {how}."
    return f"Recommended: {nodes}: {_times(found.over_plain)} plain decoding{_against(found)}."


def _asked_for(found: Assessment) -> str:
    """Tokens per step were asked for, whatever they cost."""
    best = found.figures(TREE)
    own = found.result[TREE]
    if not own.tree.paths:
        return (
            "Asked for tokens per step: plain decoding, 1 token per step; a budget of "
            f"{found.result.settings.budget} holds no draft node of any probability. Raise --budget."
        )
    honest = None if best is None else best.tokens_per_step
    how = "by its own score" if found.assumptions.prompts is not None else "as the accuracies let expect"
    per_step = f"{own.tokens_per_step:.3f} tokens per step {how}" if honest is None else _per_step(honest)
    words = f"Asked for tokens per step: {TREE}, {per_step}."
    speed = found.over_plain.value if found.over_plain is not None else own.speedup
    if speed is None:
        return f"{words} Width {own.tree.verify_width} has no time, so nothing is said about speed."
    slower = ", so plain decoding is faster" if speed < 1 else ""
    return f"{words} By the measured step times it is {speed:.2f} times plain decoding{slower}."


def _over(best: Standing, other: Standing, *, of_steps: bool) -> str:
    """How far ahead of other heads the best ones are."""
    against = f"{other.name} with the {other.found.recommended}"
    if other.found.recommended == PLAIN:
        against = f"plain decoding, which {other.name} does not beat"
    if other.chosen_over is not None:
        sure = "" if other.sure is None else f", {_percent(other.sure)} sure"
        return f"{_times(other.chosen_over)} {against}{sure}"
    own, theirs = (standing.found.result[standing.found.recommended] for standing in (best, other))
    if of_steps:
        times = own.tokens_per_step / theirs.tokens_per_step
    elif other.found.recommended == PLAIN:
        times = own.speedup or 0.0
    else:
        times = (own.tokens_per_s or 0.0) / (theirs.tokens_per_s or 1.0)
    return f"{times:.2f} times {against}, by their own scores"


def _per_step(figure: Figure) -> str:
    return f"{figure.value:.3f} tokens per step{_range(figure, 3)}"


def _times(figure: Figure) -> str:
    return f"{figure.value:.2f} times{_range(figure, 2)}"


def _range(figure: Figure, digits: int) -> str:
    if figure.interval is None:
        return ""
    return f" (95 % interval {figure.interval.low:.{digits}f} to {figure.interval.high:.{digits}f})"


def _against(found: Assessment) -> str:
    """How sure it is that the runner-up is slower."""
    if found.over_runner_up is None:
        return ""
    name, figure = found.over_runner_up
    sure = "" if found.sure is None else f", {_percent(found.sure)} sure"
    if name == PLAIN:  # how far ahead of plain decoding has been said
        return sure
    return f", {_times(figure)} the {name.removeprefix('best ')}{sure}"


def _percent(share: float) -> str:
    return "over 99 %" if share > 0.99 else f"{100 * share:.0f} %"
