"""What users ask of `generate`: stop strings, logits processors, streamers, padding, and one clear error each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from folders import word_tokenizer
from models import NEW_TOKENS, PROMPTS, TREES, VOCAB, as_users_run_it, heads_of, plain_text, target_of, tiny_llama
from transformers import TextStreamer
from transformers.generation import logits_process

from topo_search.answers import answer_batch
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.ending import StopStrings
from topo_search.decode.habits import TreeGenerator, unpadded
from topo_search.errors import CheckError, InputError
from topo_search.identity import GREEDY, sampling_rule
from topo_search.reference import generate_plain
from topo_search.report.stream import TextPieces, summary
from topo_search.stats import DecodeStats
from topo_search.target import Target
from topo_search.tree import Tree

TARGET, HEADS = replace(target_of("llama"), tokenizer=word_tokenizer()), heads_of("llama")


def decoder_of(tree: str, target: Target = TARGET) -> TreeDecoder:
    return TreeDecoder(target, HEADS, TREES[tree], capacity=64, run_probe=False)


GENERATOR = TreeGenerator(decoder_of("dense"))


# Stop strings


class ByteTokenizer:
    """Token n is the n-th piece; borders fall inside words and inside a character of two bytes."""

    PIECES = (b"ab", b"c", b"de", "é".encode()[:1], "é".encode()[1:], b" x", b"f")

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return b"".join(self.PIECES[i % len(self.PIECES)] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("stop", ["bcd", "abcde", "é", "é x", "c", "deé xf"])
def test_a_stop_string_is_found_whatever_the_borders_of_tokens(stop: str) -> None:
    """At the first token that completes it, and not before."""
    stops, tokenizer = StopStrings(strings=(stop, "never"), tokenizer=ByteTokenizer()), ByteTokenizer()
    answer = [6, 0, 1, 2, 3, 4, 5, 6]
    found = [stops.completed_by_last(answer[: n + 1]) for n in range(len(answer))]
    first = next(n for n in range(len(answer)) if stop in tokenizer.decode(answer[: n + 1]))
    assert found.index(True) == first


@pytest.mark.parametrize("tree", ["empty", "chain", "dense", "medusa-63"])
def test_a_stop_string_ends_the_answer_inside_a_path(tree: str) -> None:
    target = replace(TARGET, tokenizer=ByteTokenizer())
    decoder = decoder_of(tree, target)
    for prompt in PROMPTS:
        free = plain_text("llama", prompt).tokens
        for length in (2, 5, 9):
            stop = ByteTokenizer().decode(free[length - 2 : length])
            if "\N{REPLACEMENT CHARACTER}" in stop:
                continue  # half a character is no text
            expected = next(n for n in range(NEW_TOKENS + 1) if stop in ByteTokenizer().decode(free[:n]))
            answer = decoder.generate(prompt, max_new_tokens=NEW_TOKENS, stop_strings=[stop])
            assert (answer.tokens, answer.end) == (free[:expected], "stop")


def test_stop_strings_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(InputError, match="A stop string is empty; leave it out"):
        decoder_of("dense").generate(PROMPTS[0], max_new_tokens=4, stop_strings=["a", ""])
    with pytest.raises(InputError, match="Stop strings need a tokenizer, and this target has none"):
        decoder_of("dense", target_of("llama")).generate(PROMPTS[0], max_new_tokens=4, stop_strings=["a"])


# Logits processors


class Recorder:
    """Changes nothing and notes every sequence it is asked about."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(input_ids[0].tolist()))
        return scores


PROCESSORS: dict[str, Any] = {
    "repetition": lambda: [logits_process.RepetitionPenaltyLogitsProcessor(1.3)],
    "no repeated pairs": lambda: [logits_process.NoRepeatNGramLogitsProcessor(2)],
    "least length": lambda: [logits_process.MinLengthLogitsProcessor(14, [51, 44], device="cpu")],
    "two of them": lambda: [
        logits_process.RepetitionPenaltyLogitsProcessor(1.1),
        logits_process.NoRepeatNGramLogitsProcessor(3),
    ],
}


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("rule", [GREEDY, sampling_rule(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_processors_act_as_in_generate(processors: str, rule: Any) -> None:
    """FIELD-CASES 76: applied along each path, before temperature and filters."""
    for prompt in PROMPTS:
        plain = generate_plain(
            TARGET, prompt, max_new_tokens=NEW_TOKENS, rule=rule, processors=PROCESSORS[processors]()
        )
        for tree in ("empty", "dense", "medusa-63"):
            answer = decoder_of(tree).generate(
                prompt, max_new_tokens=NEW_TOKENS, rule=rule, processors=PROCESSORS[processors]()
            )
            assert answer.tokens == plain.tokens


def test_a_processor_sees_the_calls_of_plain_decoding() -> None:
    """FIELD-CASES 76: so even one with a state of its own, such as a grammar, meets nothing new."""
    free = plain_text("llama", PROMPTS[1]).tokens
    expected = [(*PROMPTS[1], *free[:n]) for n in range(11)]
    for tree in ("empty", "dense", "medusa-63"):
        recorder = Recorder()
        answer = decoder_of(tree).generate(PROMPTS[1], max_new_tokens=11, processors=[recorder])
        assert answer.tokens == free[:11]
        assert recorder.seen == expected


def test_processors_that_no_path_can_satisfy_are_refused() -> None:
    """FIELD-CASES 76."""
    beams = logits_process.PrefixConstrainedLogitsProcessor(lambda *_: [1], num_beams=1)
    with pytest.raises(InputError, match=r"PrefixConstrainedLogitsProcessor cannot be applied .* it counts beams"):
        decoder_of("dense").generate(PROMPTS[0], max_new_tokens=4, processors=[beams])
    with pytest.raises(InputError, match="Logits processor int is not callable"):
        decoder_of("dense").generate(PROMPTS[0], max_new_tokens=4, processors=[7])


# Broken logits


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rule", [GREEDY, sampling_rule(temperature=0.8, top_p=0.9)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_are_named(value: float, rule: Any) -> None:
    target = tiny_llama()
    with torch.no_grad():
        target.model.lm_head.weight[7] = value
    for tree in ("empty", "dense"):
        decoder = TreeDecoder(target, HEADS, TREES[tree], capacity=64, run_probe=False)
        with pytest.raises(CheckError, match=r"logits for position \d+ are not finite"):
            decoder.generate(PROMPTS[0], max_new_tokens=8, rule=rule)
    with pytest.raises(CheckError, match=r"logits for position \d+ are not finite"):
        answer_batch(target, PROMPTS, max_new_tokens=8, rule=rule)


# The adapter


def test_the_adapter_returns_what_generate_returns() -> None:
    ids = torch.tensor([PROMPTS[1]])
    expected = [*PROMPTS[1], *plain_text("llama", PROMPTS[1]).tokens[:9]]
    assert GENERATOR.generate(ids, max_new_tokens=9).tolist() == [expected]
    assert GENERATOR.generate(ids, max_length=len(expected), num_beams=1, use_cache=True).tolist() == [expected]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_taken_off(side: str) -> None:
    """FIELD-CASES 70: each row is what its prompt alone gives."""
    width, pad = max(map(len, PROMPTS)), 60
    ids, mask = torch.full((len(PROMPTS), width), pad), torch.zeros(len(PROMPTS), width, dtype=torch.long)
    for row, prompt in enumerate(PROMPTS):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    found = GENERATOR.generate(ids, mask, max_new_tokens=7)
    assert torch.equal(found[:, :width], ids)
    assert [tuple(row) for row in found[:, width:].tolist()] == [plain_text("llama", p).tokens[:7] for p in PROMPTS]


def test_shorter_answers_are_padded_on_the_right() -> None:
    free = [plain_text("llama", prompt).tokens for prompt in PROMPTS[:2]]
    ids, mask = torch.tensor([[0, 0, *PROMPTS[0]], list(PROMPTS[1])]), torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    end = free[0][3]
    found = GENERATOR.generate(ids, mask, max_new_tokens=12, eos_token_id=end, pad_token_id=9)[:, 5:].tolist()
    for row, text in zip(found, free, strict=True):
        stop = text.index(end) + 1 if end in text[:12] else 12
        assert row == [*text[:stop], *[9] * (len(row) - stop)]


def test_sampling_follows_the_row_number() -> None:
    ids = torch.tensor([PROMPTS[0], PROMPTS[0]])
    found = GENERATOR.generate(ids, max_new_tokens=9, do_sample=True, temperature=0.9, top_p=0.9, seed=4)
    rule = sampling_rule(temperature=0.9, top_p=0.9, seed=4)
    for row in (0, 1):
        alone = decoder_of("empty").generate(PROMPTS[0], max_new_tokens=9, rule=rule, request=row)
        assert tuple(found[row, 3:].tolist()) == alone.tokens


def test_a_streamer_of_transformers_writes_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.tensor([PROMPTS[1]])
    found = GENERATOR.generate(ids, max_new_tokens=9, streamer=TextStreamer(TARGET.tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == TARGET.tokenizer.decode(found[0, 5:]).split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 4, "num_beams": 4}, "num_beams=4 cannot be honoured: a tree verifies one text"),
        ({"max_new_tokens": 4, "repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor into logits_processor"),
        ({"max_new_tokens": 4, "stopping_criteria": [1]}, "stopping_criteria.*use stop_strings"),
        ({"max_new_tokens": 4, "colour": "red"}, "has no argument 'colour'"),
        ({}, "exactly one of max_new_tokens and max_length"),
        ({"max_new_tokens": 4, "max_length": 9}, "exactly one of max_new_tokens and max_length"),
        ({"max_length": 3}, "max_length is 3, but the prompt takes 3"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; an answer has at least 1 token"),
        ({"max_new_tokens": 4, "do_sample": True, "temperature": 0.0}, "temperature is 0.0 with do_sample=True"),
        ({"max_new_tokens": 4, "do_sample": True, "temperature": -1.0}, "temperature is -1.0; it must be"),
        ({"max_new_tokens": 4, "do_sample": True, "top_p": 1.5}, "top_p is 1.5; it must be"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], message: str) -> None:
    with as_users_run_it(), pytest.raises(InputError, match=message):
        GENERATOR.generate(torch.tensor([PROMPTS[0]]), **arguments)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[1, 2], [0, 0]], [[1, 1], [0, 0]], "Row 1 of input_ids holds padding only"),
        ([[1, 2, 3]], [[1, 0, 1]], "attention_mask of row 0 is 0 between tokens"),
        ([[1, 2, 3]], [[1, 1]], r"attention_mask has shape \(1, 2\), input_ids \(1, 3\)"),
        ([[1, VOCAB]], [[1, 1]], f"token id {VOCAB}, outside the target's vocabulary"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(ids: list[list[int]], mask: list[list[int]], message: str) -> None:
    with as_users_run_it(), pytest.raises(InputError, match=message):
        GENERATOR.generate(torch.tensor(ids), torch.tensor(mask), max_new_tokens=4)


def test_a_streamer_takes_one_prompt() -> None:
    with pytest.raises(InputError, match="streamer takes one prompt, not 2"):
        GENERATOR.generate(torch.tensor([[1], [2]]), max_new_tokens=4, streamer=TextStreamer(TARGET.tokenizer))


def test_without_a_mask_every_id_counts() -> None:
    assert unpadded(torch.tensor([[0, 5], [6, 0]]), None) == [[0, 5], [6, 0]]


# Text on the terminal


def test_pieces_never_show_half_a_character() -> None:
    pieces = TextPieces(ByteTokenizer().decode)
    assert [pieces.add([token]) for token in (0, 3, 4, 1, 3)] == ["ab", "", "é", "c", ""]
    assert pieces.rest() == "\N{REPLACEMENT CHARACTER}"


def test_the_closing_line_has_steps_and_speed() -> None:
    line = summary(DecodeStats.of([2, 0, 1]), 7, 2.0)
    assert "7 tokens, the first by the prompt's own pass, the others in 3 steps: 2.00 tokens per step" in line
    assert "3.0 tokens/s" in line
    assert "tokens/s" not in summary(DecodeStats.of([]), 1, 0.0)


def test_plain_decoding_takes_all_of_it_too() -> None:
    decoder = TreeDecoder(TARGET, None, Tree(()), capacity=64, run_probe=False)
    answer = TreeGenerator(decoder).generate(torch.tensor([PROMPTS[0]]), max_new_tokens=5, do_sample=True, seed=1)
    rule = sampling_rule(temperature=1.0, seed=1)
    assert tuple(answer[0, 3:].tolist()) == decoder.generate(PROMPTS[0], max_new_tokens=5, rule=rule).tokens
