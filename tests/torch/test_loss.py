"""What heads learn from: rows and labels by closed form, the loss by an independent reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from learning import FAMILIES, HEADS, fresh, learner, loss_of, own_text, plain_states, states_of, texts_of
from models import VOCAB
from torch import Tensor, nn
from torch.nn import functional

from topo_search.calibrate import true_paths
from topo_search.training.batches import IGNORED, load_batch, rows_of
from topo_search.training.heads import evaluate
from topo_search.training.loss import Candidates
from topo_search.training.text import TrainingText, text_of

SHORTLIST = torch.arange(0, VOCAB, 2)


# Rows


def counted(lengths: tuple[tuple[int, int], ...]) -> TrainingText:
    """Texts of (prompt, answer) lengths whose tokens count up from 0 through all of them."""
    total = sum(prompt + answer for prompt, answer in lengths)
    parts = torch.arange(total).split([prompt + answer for prompt, answer in lengths])
    return text_of(parts, [prompt for prompt, _ in lengths])


@pytest.mark.parametrize("lengths", [((1, 10),), ((3, 1),), ((2, 2),), ((1, 3), (4, 1), (2, 6)), ((5, 5), (1, 5))])
@pytest.mark.parametrize("heads", [1, 3, 6])
def test_head_k_at_position_g_learns_the_token_k_after_the_root(
    lengths: tuple[tuple[int, int], ...], heads: int
) -> None:
    """FIELD-CASES 82: the state at g chose s_{g+1}; head k guesses s_{g+1+k} after s_{g+1} .. s_{g+k}."""
    text = counted(lengths)
    rows = rows_of(text, torch.arange(len(lengths)), heads)
    expected = []
    for index, (prompt, answer) in enumerate(lengths):
        start = int(text.starts[index])
        end = start + prompt + answer
        expected += [(g, index, end) for g in range(start + prompt - 1, end) if g + 2 < end]
    assert rows.positions.tolist() == [g for g, _, _ in expected]
    assert rows.text_of_row.tolist() == [index for _, index, _ in expected]
    for row, (g, _, end) in enumerate(expected):
        for k in range(1, heads + 1):
            inside = g + 1 + k < end
            assert rows.labels[row, k - 1] == (g + 1 + k if inside else IGNORED)
            if inside:  # tokens are their own positions here
                assert rows.path[row, :k].tolist() == list(range(g + 1, g + 1 + k))
                assert rows.teachers[row, k - 1] == g + k


def test_labels_are_what_the_text_says_was_chosen() -> None:
    """The path stays the text's own, whatever was chosen after it."""
    text = counted(((2, 6), (3, 4)))
    chosen = replace(text, choices=text.tokens + 101)
    plain, rows = rows_of(text, torch.arange(2), 3), rows_of(chosen, torch.arange(2), 3)
    assert torch.equal(rows.path, plain.path) and torch.equal(rows.positions, plain.positions)
    known = plain.labels != IGNORED
    assert torch.equal(rows.labels[known], plain.labels[known] + 100)
    assert bool((rows.labels[~known] == IGNORED).all())
    assert torch.equal(chosen.select([1]).choices, chosen.choices[8:])  # type: ignore[index,arg-type]
    assert chosen.digest != text.digest


def test_rows_are_those_of_calibration() -> None:
    """The true path that calibration ranks at a row is the row's root and labels."""
    text = own_text()
    rows = rows_of(text, torch.arange(len(text.prompt_lengths)), HEADS)
    for index, tokens in enumerate(texts_of(text)):
        answer = tokens[int(text.prompt_lengths[index]) :]
        paths = true_paths(answer, HEADS)
        mine = rows.text_of_row == index
        assert int(mine.sum()) == len(answer) - 1  # the last answer token has nothing after it
        assert torch.equal(rows.path[mine, 0], paths[:, 0])
        assert torch.equal(torch.where(rows.labels[mine] == IGNORED, 0, rows.labels[mine]), paths[:, 1:])


@pytest.mark.parametrize("whole", [False, True])
def test_a_batch_points_at_the_states_of_its_rows(whole: bool) -> None:
    text, states = own_text(), states_of(own_text())
    chosen = torch.tensor([4, 0, 2])
    batch, rows = load_batch(text, states, chosen, HEADS, whole=whole), rows_of(text, chosen, HEADS)
    flat = batch.states.flatten(0, 1)
    assert torch.equal(flat[batch.rows], states.rows(rows.positions))
    assert torch.equal(flat[batch.teachers], states.rows(rows.teachers))
    prompts = text.prompt_lengths[chosen] - 1
    assert batch.mask.sum(dim=1).tolist() == (text.lengths[chosen] - (0 if whole else prompts)).tolist()
    assert bool(batch.mask.flatten()[batch.rows].all())


# The loss


@torch.no_grad()
def reference(
    blocks: nn.Module, *, columns: Tensor, projection: Tensor | None, distill: float
) -> tuple[list[float], list[int]]:
    """Sum and number of every head's losses, text by text and row by row, each head fed as the decoder feeds it."""
    weight, embed = learner().output_weight, learner().input_embeddings
    sums, counts = [0.0] * HEADS, [0] * HEADS
    for tokens, prompt in zip(texts_of(own_text()), own_text().prompt_lengths.tolist(), strict=True):
        states = plain_states(tokens).half().float()
        following = embed(torch.cat([tokens[1:], tokens[-1:]]))
        features = blocks.read_prefix(states[None], following[None])[0]
        for g in range(prompt - 1, len(tokens) - 2):
            for k in range(1, HEADS + 1):
                if g + 1 + k >= len(tokens) or tokens[g + 1 + k] not in columns:
                    continue
                if hasattr(blocks, "head"):
                    handed = blocks.head(k - 1, features[g], embed(tokens[g + 1 : g + 1 + k]))
                else:
                    handed = blocks(features[g : g + 1], HEADS)[k - 1, 0]
                logits = handed @ (weight[columns] if projection is None else projection[k - 1]).T
                wanted = int(torch.nonzero(columns == tokens[g + 1 + k]))
                hard = functional.cross_entropy(logits[None], torch.tensor([wanted]))
                teacher = torch.softmax(weight[columns] @ states[g + k], dim=0)
                soft = -(teacher * torch.log_softmax(logits, dim=0)).sum()
                sums[k - 1] += float((1 - distill) * hard + distill * soft)
                counts[k - 1] += 1
    return sums, counts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("own", "shortlist", "distill"),
    [(False, False, 0.0), (False, True, 0.7), (True, False, 0.7), (True, True, 0.0), (False, False, 1.0)],
)
def test_the_loss_is_plain_cross_entropy(family: str, own: bool, shortlist: bool, distill: float) -> None:
    """With and without a shortlist, own projections and the target's distribution as teacher."""
    blocks = fresh(family, own_projection=own, moved=True)
    loss = loss_of(blocks, token_map=SHORTLIST if shortlist else None, distill=distill)
    batch = load_batch(own_text(), states_of(own_text()), torch.arange(9), HEADS, whole=bool(blocks.reads_prefix))
    with torch.no_grad():
        found = loss(batch, loss.candidates(batch.labels, 0, torch.Generator()))
        columns = SHORTLIST if shortlist else torch.arange(VOCAB)
        sums, counts = reference(blocks, columns=columns, projection=blocks.projection, distill=distill)
    assert loss.supervised(batch.labels).tolist() == counts
    assert found.tolist() == pytest.approx(sums, rel=2e-4)


def test_an_own_projection_starts_as_the_shortlist_of_the_targets() -> None:
    blocks = fresh("medusa", own_projection=True)
    loss = loss_of(blocks, token_map=SHORTLIST)
    assert torch.equal(blocks.projection[1], learner().output_weight[SHORTLIST])
    assert loss.columns == len(SHORTLIST)


@pytest.mark.parametrize("distill", [0.0, 0.7])
def test_the_order_of_columns_does_not_matter(distill: float) -> None:
    loss = loss_of(fresh("hydra", moved=True), distill=distill)
    batch = load_batch(own_text(), states_of(own_text()), torch.arange(9), HEADS, whole=False)
    whole = loss.candidates(batch.labels, 0, torch.Generator())
    shuffled = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))
    other = Candidates(columns=whole.columns[shuffled], correction=whole.correction)
    assert torch.allclose(loss(batch, other), loss(batch, whole), rtol=1e-5)


def test_the_correction_changes_the_denominator_only() -> None:
    """The loss of the sampled columns by hand: raised scores in the normaliser, plain ones in the labels' terms."""
    loss = loss_of(fresh("medusa", moved=True), distill=0.7)
    batch = load_batch(own_text(), states_of(own_text()), torch.tensor([4]), HEADS, whole=False)
    candidates = loss.candidates(batch.labels, 9, torch.Generator().manual_seed(0))
    columns, correction = candidates.columns, candidates.correction
    assert bool((correction > 0).any())
    weight = learner().output_weight[columns]
    with torch.no_grad():
        found, handed = loss(batch, candidates), loss.handed(batch)
    flat = batch.states.flatten(0, 1)
    for k in range(HEADS):
        total = 0.0
        for row, label in enumerate(batch.labels[:, k].tolist()):
            if label == IGNORED:
                continue
            scores = weight @ handed[k, row]
            normaliser = (scores + correction).exp().sum().log()
            teacher = torch.softmax(weight @ flat[batch.teachers[row, k]] + correction, dim=0)
            hard = normaliser - scores[columns == label]
            soft = (teacher * (normaliser - scores)).sum()
            total += float(0.3 * hard + 0.7 * soft)
        assert float(found[k]) == pytest.approx(total, rel=1e-4)


def test_the_sampled_denominator_is_unbiased() -> None:
    """The mean over many samples of the softmax's denominator is that of the whole vocabulary."""
    loss, sampler = loss_of(fresh("medusa")), torch.Generator().manual_seed(1)
    scores = torch.randn(VOCAB, dtype=torch.float64)
    labels = torch.tensor([[3, 5, IGNORED], [5, 9, 20]])
    drawn = []
    for _ in range(4000):
        candidates = loss.candidates(labels, 12, sampler)
        columns = candidates.columns.tolist()
        assert {3, 5, 9, 20} <= set(columns)
        assert len(set(columns)) == len(columns) < VOCAB
        drawn.append((scores[candidates.columns] + candidates.correction).exp().sum())
    estimates = torch.stack(drawn)
    error = estimates.std() / len(drawn) ** 0.5
    assert abs(estimates.mean() - scores.exp().sum()) < 4 * error < 0.02 * scores.exp().sum()


def test_sampled_negatives_are_columns_of_the_shortlist() -> None:
    loss = loss_of(fresh("medusa"), token_map=SHORTLIST)
    candidates = loss.candidates(torch.tensor([[2, 3, 60]]), 8, torch.Generator().manual_seed(0))
    assert {1, 30} <= set(candidates.columns.tolist())  # 3 is no drafted token
    assert int(candidates.columns.max()) < len(SHORTLIST)
    full = loss.candidates(SHORTLIST[:, None], 8, torch.Generator())  # the batch holds every column
    assert full.columns.tolist() == list(range(len(SHORTLIST)))
    assert not full.correction.any()


# Held-out text


@pytest.mark.parametrize("family", ["medusa", "hydra", "hydra++"])
@pytest.mark.parametrize("shortlist", [False, True])
def test_held_out_figures_by_hand(family: str, shortlist: bool) -> None:
    blocks = fresh(family, moved=True)
    loss = loss_of(blocks, token_map=SHORTLIST if shortlist else None)
    columns = SHORTLIST if shortlist else torch.arange(VOCAB)
    held = evaluate(loss, own_text(), states_of(own_text()), num_heads=HEADS, texts_at_once=4)
    sums, counts = reference(blocks, columns=columns, projection=None, distill=0.0)
    assert held.loss == pytest.approx([s / c for s, c in zip(sums, counts, strict=True)], rel=1e-3)
    right: list[list[bool]] = []
    batch = load_batch(own_text(), states_of(own_text()), torch.arange(9), HEADS, whole=True)
    with torch.no_grad():
        handed = loss.handed(batch)
    for row, labels in enumerate(batch.labels.tolist()):
        best = [int(columns[loss.scores(handed[k, row : row + 1], k).argmax()]) for k in range(HEADS)]
        right.append([best[k] == labels[k] for k in range(HEADS) if labels[k] != IGNORED])
    assert held.rows == len(right)
    for k in range(HEADS):
        known = [row[k] for row in right if len(row) > k]
        on_path = [row[k] for row in right if len(row) > k and all(row[:k])]
        assert held.accuracy[k] == pytest.approx(sum(known) / len(known), abs=1e-4)
        assert held.accuracy_given_path[k] == pytest.approx(sum(on_path) / max(len(on_path), 1), abs=1e-4)


def test_a_text_with_the_rarest_lengths_is_evaluated() -> None:
    """Answers of one token have no row; a whole text of them has none at all."""
    text = text_of([torch.tensor([3, 4, 5]), torch.tensor([6, 7])], [2, 1])
    held = evaluate(loss_of(fresh("hydra++")), text, states_of(text), num_heads=HEADS)
    assert held.rows == 0
    assert held.loss == (0.0, 0.0, 0.0)


def test_learning_from_the_target_is_learning_its_distribution() -> None:
    """distill = 1: the gradient vanishes exactly where the head's distribution is the teacher's."""
    blocks = fresh("medusa", own_projection=True)
    loss = loss_of(blocks, distill=1.0)
    batch = load_batch(own_text(), states_of(own_text()), torch.arange(9), HEADS, whole=False)
    batch = type(batch)(
        states=batch.states,
        following=batch.following,
        mask=batch.mask,
        rows=batch.rows,
        teachers=batch.rows[:, None].expand(-1, HEADS).contiguous(),  # an untrained head repeats this very teacher
        path=batch.path,
        labels=batch.labels,
    )
    loss(batch, loss.candidates(batch.labels, 0, torch.Generator())).sum().backward()
    assert float(blocks.projection.grad.abs().max()) < 1e-4
    assert math.isfinite(float(blocks.weight.grad.abs().max()))
    assert float(blocks.weight.grad.abs().max()) < 1e-3
