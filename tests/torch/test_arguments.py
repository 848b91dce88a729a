"""What users hand to the library by mistake: each slip is refused by the argument's name, none is taken silently."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folders import word_tokenizer
from models import PROMPTS, TREES, as_users_run_it, heads_of, plain_text, target_of

import topo_search
from topo_search.decode.batch import decode_batch
from topo_search.decode.decoder import TreeDecoder
from topo_search.decode.habits import TreeGenerator
from topo_search.errors import InputError
from topo_search.identity import sampling_rule
from topo_search.tree import Tree

TARGET, HEADS = replace(target_of("llama"), tokenizer=word_tokenizer()), heads_of("llama")
DECODER = TreeDecoder(TARGET, HEADS, TREES["dense"], capacity=64, run_probe=False)
GENERATOR = TreeGenerator(DECODER)
IDS = torch.tensor([PROMPTS[0]])
FREE = [plain_text("llama", prompt).tokens for prompt in PROMPTS]
TO_RULE = r"one argument, rule=sampling_rule\(temperature=\.\.\., seed=\.\.\.\)"

SETTINGS: list[tuple[dict[str, Any], str]] = [
    *(({name: 1}, f"no argument '{name}'.*{TO_RULE}") for name in ("temperature", "top_k", "top_p", "min_p", "seed")),
    ({"do_sample": True}, f"no argument 'do_sample'.*{TO_RULE}"),
    (
        {"colour": "red"},
        "no argument 'colour'; besides max_new_tokens there are eos_token_ids, rule, request, stop_str",
    ),
    ({"rule": "greedy"}, r"rule is 'greedy'; give what sampling_rule\(.*\) returns, or leave it out for greedy"),
    ({"rule": {"temperature": 0.7}}, "rule is {'temperature': 0.7}; give what sampling_rule"),
    ({"rule": None}, "rule is None; give what sampling_rule"),
    ({"eos_token_ids": "a"}, "eos_token_ids is 'a'; give one token id or a list"),
    ({"eos_token_ids": 2.0}, "eos_token_ids is 2.0; give one token id or a list"),
    ({"eos_token_ids": [1, True]}, "eos_token_ids is True; token ids are whole numbers from 0 on"),
    ({"eos_token_ids": -1}, r"eos_token_ids is -1; token ids .* and with \[\] none ends an answer"),
    ({"stop_strings": 7}, "stop_strings is 7; give a text or a list of texts"),
    ({"stop_strings": ["a", 7]}, r"stop_strings is \['a', 7\]; give a text"),
    ({"stop_strings": b"a"}, "stop_strings is b'a'; give a text"),
    ({"stop_strings": ""}, "A stop string is empty"),
    ({"processors": 7}, "Logits processors come in a list, and int is none"),
    ({"observe": 7}, "observe is 7; give a function of one argument"),
    *(({"max_new_tokens": n}, f"max_new_tokens is {n!r}; an answer has at least 1 token") for n in ("4", 2.5, True, 0)),
]
OF_ONE: list[tuple[dict[str, Any], str]] = [
    ({"request": n}, f"request is {n!r}; the number of a sequence is whole") for n in ("x", -1, 1.5, True, 1 << 63)
]
TEXT = "The prompt is text, and a decoder takes token ids, not text: target.encode_chat"
NO_PROMPTS: list[tuple[Any, str]] = [
    ("Why is the sky blue?", TEXT),
    (None, "The prompt is None; give its token ids"),
    (7, "The prompt is 7; give its token ids"),
    ({"input_ids": [1]}, "The prompt is {'input_ids': .*}; give its token ids"),
    ([1.0, 2.0], "The prompt holds 1.0; token ids are whole numbers"),
    ([1, True], "The prompt holds True; token ids are whole numbers"),
    (["a"], "The prompt holds 'a'; token ids are whole numbers"),
    (torch.tensor([1.0]), "The prompt holds 1.0; token ids"),
    (torch.tensor([True]), "The prompt holds True; token ids"),
    (torch.tensor(1), r"one prompt at a time .batch 1 only., not shape \(\)"),
    ([torch.tensor([1, 2])], "one prompt at a time"),
]


def refused(message: str) -> Any:
    return pytest.raises(InputError, match=re.compile(message, re.DOTALL))


@pytest.mark.parametrize(("settings", "message"), [*SETTINGS, *OF_ONE])
def test_a_setting_that_means_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with as_users_run_it():
        for call in (DECODER.generate, DECODER.stream):  # stream refuses when it is called, not when it is read
            with refused(message):
                call(PROMPTS[0], **{"max_new_tokens": 4, **settings})
        if "request" not in settings:
            with refused(message):
                decode_batch(DECODER, PROMPTS, **{"max_new_tokens": 4, **settings})


@pytest.mark.parametrize(("prompt", "message"), NO_PROMPTS)
def test_what_is_no_prompt_is_refused(prompt: Any, message: str) -> None:
    with as_users_run_it():
        with refused(message):
            DECODER.generate(prompt, max_new_tokens=4)
        with refused(message.replace("The prompt", r"prompts\[1\]")):
            decode_batch(DECODER, [PROMPTS[0], prompt], max_new_tokens=4)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([1, 2, 3], {}, r"flat list of token ids, one prompt; decode_batch takes a list of them: \[ids\]"),
        (IDS, {}, r"prompts is tensor\(\[\[1, 2, 3\]\]\); .*each a list of token ids. .*TreeGenerator"),
        ("text", {}, "prompts is 'text'; decode_batch takes a list of prompts"),
        (None, {}, "prompts is None; decode_batch takes"),
        (PROMPTS, {"request": 1}, r"leave request out, or give requests=\[...\], one per prompt"),
        (PROMPTS, {"requests": 3}, "requests is 3; give a list of numbers"),
        (PROMPTS, {"requests": [0, 1, 2, -1]}, r"requests\[3\] is -1; the number of a sequence"),
    ],
)
def test_what_is_no_batch_is_refused(prompts: Any, settings: dict[str, Any], message: str) -> None:
    with as_users_run_it(), refused(message):
        decode_batch(DECODER, prompts, max_new_tokens=4, **settings)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"target": "demo"}, r"target is 'demo'; give what load_target\(...\) returns"),
        ({"heads": "demo-medusa"}, r"heads is 'demo-medusa'; give what load_heads\(..., target\) returns"),
        ({"tree": SimpleNamespace(tree=Tree(()))}, r"; give its .tree, as in read_tree\(path\).tree"),
        ({"tree": [[0], [0, 0]]}, r"tree is \[\[0\], \[0, 0\]\]; give Tree.parse\(paths\)"),
        ({"tree": Path("a.tree.json")}, r"give a Tree, such as read_tree\(path\).tree"),
        ({"tree": None}, r"tree is None; give a Tree, .*Tree\(\(\)\) is plain decoding"),
        ({"capacity": 0}, "capacity is 0; it counts the tokens of prompt and answer, at least 1"),
        ({"capacity": "big"}, "capacity is 'big'; it counts"),
    ],
)
def test_what_makes_no_decoder_is_refused(parts: dict[str, Any], message: str) -> None:
    with as_users_run_it(), refused(message):
        TreeDecoder(**{"target": TARGET, "heads": HEADS, "tree": Tree(()), **parts})


def test_what_is_no_decoder_is_refused() -> None:
    with as_users_run_it(), refused(r"decoder is a Target; give a TreeDecoder\(target, heads, tree\)"):
        decode_batch(TARGET, PROMPTS, max_new_tokens=4)  # type: ignore[arg-type]
    with as_users_run_it(), refused(r"decoder is a MedusaHeads; give a TreeDecoder"):
        TreeGenerator(HEADS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Tree.dense("32"), "A dense tree is a list of candidates per depth"),  # type: ignore[arg-type]
        (lambda: Tree.dense(3), "A dense tree is a list of candidates per depth such as .*, not 3"),  # type: ignore[arg-type]
        (lambda: Tree.dense([2.5]), "Entry 0 of a dense tree is 2.5"),  # type: ignore[list-item]
        (lambda: Tree.chain("3"), "A chain's length is '3'"),  # type: ignore[arg-type]
        (lambda: sampling_rule(temperature=None), "temperature is None; it must be a number"),  # type: ignore[arg-type]
        (lambda: sampling_rule(temperature=True), "temperature is True; it must be a number"),
    ],
)
def test_trees_and_rules_of_other_types_are_refused(call: Any, message: str) -> None:
    with as_users_run_it(), refused(message):
        call()


# What is meant is done


def test_one_end_of_text_id_needs_no_list() -> None:
    end = FREE[0][3]
    found = DECODER.generate(PROMPTS[0], max_new_tokens=12, eos_token_ids=end)
    assert (found.tokens, found.end) == (FREE[0][: FREE[0].index(end) + 1], "eos")
    assert decode_batch(DECODER, [PROMPTS[0]], max_new_tokens=12, eos_token_ids=torch.tensor([end]))[0].end == "eos"


def test_a_text_is_one_stop_string_and_not_its_letters() -> None:
    tokenizer = TARGET.tokenizer
    stop = tokenizer.decode(FREE[0][3:5])
    for given in (stop, [stop], iter([stop])):  # an iterator serves every row of a batch
        rows = decode_batch(DECODER, [PROMPTS[0]] * 2, max_new_tokens=12, stop_strings=given)
        assert [(row.tokens, row.end) for row in rows] == [(FREE[0][: len(rows[0].tokens)], "stop")] * 2
        assert 1 < len(rows[0].tokens) <= 5
    assert DECODER.generate(PROMPTS[0], max_new_tokens=12, stop_strings="zebra").end == "cap"


def test_a_row_of_a_sampled_batch_is_the_run_of_its_request() -> None:
    rule = sampling_rule(temperature=1.0, seed=3)
    rows = decode_batch(DECODER, [PROMPTS[0]] * 2, max_new_tokens=12, rule=rule)
    alone = [DECODER.generate(PROMPTS[0], max_new_tokens=12, rule=rule, request=i).tokens for i in (0, 1)]
    assert [row.tokens for row in rows] == alone
    assert alone[0] != alone[1]


# The adapter


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [list(PROMPTS[0])]}, r"input_ids is a list; give a tensor .*torch.tensor\(\[ids\]\)"),
        ({"input_ids": torch.empty(0, 3, dtype=torch.long)}, "input_ids has no row"),
        ({"input_ids": IDS.float()}, "holds 1.0; token ids are whole numbers"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask is a list; give a tensor"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; give True to draw"),
        ({"do_sample": True, "temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"do_sample": True, "top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"do_sample": True, "seed": "3"}, "seed is '3'; it must be a whole number"),
        ({"eos_token_id": "a"}, "eos_token_id is 'a'; give one token id"),
        ({"eos_token_id": -1}, "eos_token_id is -1; token ids are"),
        ({"pad_token_id": -1}, "pad_token_id is -1; it is a token id"),
        ({"max_new_tokens": None, "max_length": "9"}, "max_length is '9'; it counts tokens"),
        ({"streamer": print}, "streamer is a builtin_function_or_method; give one of transformers"),
    ],
)
def test_the_adapter_names_what_it_cannot_take(arguments: dict[str, Any], message: str) -> None:
    with as_users_run_it(), refused(message):
        GENERATOR.generate(**{"input_ids": IDS, "max_new_tokens": 4, **arguments})


def test_filters_without_do_sample_are_named_in_a_warning() -> None:
    with pytest.warns(UserWarning, match="temperature=0.7, top_p=0.9 has no effect .* pass do_sample=True"):
        found = GENERATOR.generate(IDS, max_new_tokens=6, temperature=0.7, top_p=0.9)
    assert tuple(found[0, 3:].tolist()) == FREE[0][:6]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for neutral in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}):
            GENERATOR.generate(IDS, max_new_tokens=2, **neutral)


# Conversations


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages is a str; a conversation is a list of messages such as"),
        ([], "messages is empty; a conversation is a list"),
        ({"role": "user", "content": "Hello"}, "messages is a dict; a conversation is a list"),
        (["Hello"], r"messages\[0\] has no role"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] has no role; a message has both"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str) -> None:
    with as_users_run_it(), refused(message):
        TARGET.encode_chat(messages)


@pytest.mark.parametrize(("tokenizer", "missing"), [(None, "tokenizer"), (word_tokenizer(), "chat template")])
def test_a_conversation_needs_a_template(tokenizer: Any, missing: str) -> None:
    if tokenizer is not None:
        tokenizer.chat_template = None
    with refused(f"has no {missing}, .*tokenizer=...\\) that has a template, or decode token ids of raw text"):
        replace(TARGET, tokenizer=tokenizer).encode_chat([{"role": "user", "content": "w1"}])


# Noise of other packages


def test_loading_the_library_leaves_loggers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao warns of kernels for other devices wherever transformers imports it."""
    logger, seen = logging.getLogger("torchao"), []
    monkeypatch.setattr(topo_search, "import_module", lambda name: seen.append(logger.level) or topo_search.tree)
    before = logger.level
    try:
        logger.setLevel(logging.INFO)
        assert topo_search.Tree is Tree
        assert (seen, logger.level) == ([logging.ERROR], logging.INFO)
    finally:
        logger.setLevel(before)
