"""The text that a training reads: stores, what of them is held out, hidden states, what the target would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from topo_search.cli.training_job import Job
from topo_search.errors import InputError, MismatchError

if TYPE_CHECKING:
    from topo_search.target import Target
    from topo_search.training.heads import Corpus
    from topo_search.training.text import TrainingText

_LOW_AGREEMENT = 0.8  # greedy text comes to about 1, text sampled at a temperature of 0.7 to about 0.8


def require_readable(job: Job) -> None:
    """Refuse a text store, prompts or ordinary text that cannot be read, before the target is loaded for it.

    Raises:
        InputError: it is missing, empty or damaged, or a store is named twice.
    """
    from topo_search.files.prompts import read_prompts
    from topo_search.training.text import read_ordinary, read_text_store

    read_ordinary(job.ordinary)
    if len({store.resolve() for store in job.texts}) < len(job.texts):
        raise InputError(f"--text names a store twice ({', '.join(map(str, job.texts))}); name each once.")
    for store in job.texts:
        read_text_store(store)
    if not job.texts and job.prompts is not None:
        read_prompts(job.prompts)


def training_texts(model: Target, job: Job) -> list[TrainingText]:
    """The text of every store, or what the target writes now.

    Raises:
        MismatchError: another target wrote a store.
    """
    from topo_search.cli.distill import write_text_store
    from topo_search.report.console import note
    from topo_search.training.text import new_prompts_only, read_text_store, store_target

    if not job.texts:
        written = write_text_store(
            model,
            job.work / "text",
            job.prompts,
            num_prompts=job.num_prompts,
            max_new_tokens=job.max_new_tokens,
            seed=job.recipe.seed,
        )
        return [written]
    texts: list[TrainingText] = []
    for store in job.texts:
        if store_target(store) != model.identity.fingerprint:
            raise MismatchError(
                f"{store} was written by another target ({store_target(store)}, not {model.identity.fingerprint}): "
                "heads trained on it would guess that one's words. Run topo-search distill with this target."
            )
        text = read_text_store(store)
        new = new_prompts_only(text, texts)
        known, asked = len(text.prompt_lengths) - len(new.prompt_lengths), len(text.prompt_lengths)
        if known:
            note(f"{known} of {asked} prompts of {store} are answered in a store before it and left out.")
        if known < asked:
            texts.append(new)
    return texts


def split_each(job: Job, texts: Sequence[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """Texts to train on and texts to hold out, of each store its share: what else is read does not change them."""
    from topo_search.training.heads import split_held_out

    parts = [split_held_out(text, job.held_out, seed=job.recipe.seed) for text in texts]
    return [kept for kept, _ in parts], [held for _, held in parts]


def learned_from(model: Target, job: Job, kept: Sequence[TrainingText], own: Corpus) -> list[Corpus]:
    """The corpora in the order in which they are learned from, with what the target would have said where asked for."""
    from topo_search.training.text import ordinary_text

    corpora = []
    if job.ordinary:
        text = ordinary_text(model, job.ordinary)
        corpus = corpus_of(model, job, [text], "ordinary text", epochs=job.recipe.ordinary_epochs)
        corpora.append(_with_prompts(model, job, [text], corpus))
    return [*corpora, _with_prompts(model, job, kept, own) if job.recipe.learn_prompts else own]


def _with_prompts(model: Target, job: Job, texts: Sequence[TrainingText], corpus: Corpus) -> Corpus:
    """The corpus of `texts`, to be learned from their prompts on."""
    from topo_search.report.console import progress
    from topo_search.training.states import with_prompts
    from topo_search.training.text import join_texts

    with progress("Asking the target") as advance:
        learned = [
            with_prompts(model, text, states, job.work, progress=advance)
            for text, states in zip(texts, corpus.states.parts, strict=True)
        ]
    return replace(corpus, text=join_texts(learned))


def corpus_of(model: Target, job: Job, texts: Sequence[TrainingText], what: str, *, epochs: int = 1) -> Corpus:
    """Texts with their states in the work folder, each text's size announced first."""
    from topo_search.report.console import note, progress
    from topo_search.training.heads import Corpus
    from topo_search.training.states import HiddenStates, cached_states, states_bytes
    from topo_search.training.text import join_texts

    parts = []
    for number, text in enumerate(texts, start=1):
        size, which = states_bytes(model, text) / 1e6, f", part {number} of {len(texts)}" if len(texts) > 1 else ""
        note(f"Hidden states of {what}{which}: {len(text.tokens)} positions, {size:.0f} MB in {job.work}")
        with progress("Reading text") as advance:
            parts.append(cached_states(model, text, job.work, progress=advance))
    return Corpus(text=join_texts(texts), states=HiddenStates.joined(parts), epochs=epochs)


def agreement_of(model: Target, corpus: Corpus) -> float:
    """How far the text is what the target itself would write, with advice where it is not."""
    from topo_search.report.console import note
    from topo_search.training.states import greedy_agreement

    share = greedy_agreement(model, corpus.text, corpus.states)
    if share < _LOW_AGREEMENT:
        note(
            f"Warning: only {100 * share:.0f} % of the text's answer tokens are the target's own greedy choice, so "
            "heads trained on it would guess other words than it writes. Let the target write: topo-search distill "
            "(without --temperature for greedy text)."
        )
    return share
