"""What a user may hand to the decoder, checked once per decoder or call: one clear error each, before device work."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from topo_search.decode.ending import StopStrings
from topo_search.decode.processors import path_safe, require_stateless
from topo_search.decode.typical import Acceptable
from topo_search.errors import InputError, is_whole, shown
from topo_search.heads.base import DraftHeads
from topo_search.identity import GREEDY, RuleIdentity
from topo_search.target.adapter import Target
from topo_search.tree import Tree

MAX_REQUEST = 1 << 63
_OF_RULE = ("temperature", "top_k", "top_p", "min_p", "seed", "do_sample", "noise_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the answers of one call are asked for with.

    Attributes:
        max_new_tokens: exact cap of each.
        eos_token_ids: ids that end one.
        stops: texts that end one, or None.
        rule: how tokens are chosen.
        request: number of the sequence.
        processors: logits processors, each fit to be called along a path.
        observe: called with what steps of typical acceptance find acceptable, or None.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    stops: StopStrings | None
    rule: RuleIdentity
    request: int
    processors: tuple[Any, ...]
    observe: Callable[[Acceptable], None] | None


def asked_of(target: Target, max_new_tokens: Any, settings: Mapping[str, Any], known: Iterable[str]) -> Asked:
    """The cap and the settings of a call, `known` being the names of those there are.

    Raises:
        InputError: a setting is unknown, of a wrong type or out of range, or cannot be honoured.
    """
    _require_known(settings, known)
    rule, processors = settings.get("rule", GREEDY), path_safe(settings.get("processors"))
    if not isinstance(rule, RuleIdentity):
        raise InputError(
            f"rule is {shown(rule)}; give what sampling_rule(temperature=..., seed=...) returns, or leave it out for "
            "greedy decoding."
        )
    if rule.changes_text:
        require_stateless(processors, "the paths of a tree would share", "decode with exact acceptance")
    observe = settings.get("observe")
    if observe is not None and not callable(observe):
        raise InputError(f"observe is {shown(observe)}; give a function of one argument, or leave it out.")
    strings = texts("stop_strings", settings.get("stop_strings"))
    return Asked(
        max_new_tokens=whole(
            "max_new_tokens", max_new_tokens, "an answer has at least 1 token, a whole number", least=1
        ),
        eos_token_ids=frozenset(end_ids("eos_token_ids", settings.get("eos_token_ids"), target)),
        stops=StopStrings(strings=strings, tokenizer=target.tokenizer) if strings else None,
        rule=rule,
        request=request_number("request", settings.get("request", 0)),
        processors=processors,
        observe=observe,
    )


def one_prompt(prompt: Any, target: Target, name: str = "The prompt") -> list[int]:
    """The token ids of one prompt: a sequence of them, or a `[tokens]` or `[1, tokens]` tensor.

    Raises:
        InputError: it is no such thing, or empty, batched, too long, or has an unknown id.
    """
    ids = _token_ids(prompt, name)
    if not ids:
        raise InputError(f"{name} has no token.")
    limit = target.position_limit
    if limit is not None and len(ids) >= limit:
        raise InputError(f"{name} has {len(ids)} tokens, but the target's context is {limit}; shorten it.")
    unknown = [token for token in ids if not 0 <= token < target.known_ids]
    if unknown:
        raise InputError(f"{name} has token id {unknown[0]}, outside the target's vocabulary of {target.known_ids}.")
    return ids


def prompt_list(prompts: Any, target: Target) -> list[list[int]]:
    """The token ids of several prompts.

    Raises:
        InputError: it is no list of prompts, or one of them cannot be decoded; the message numbers it.
    """
    if not isinstance(prompts, list | tuple):
        raise InputError(
            f"prompts is {shown(prompts)}; decode_batch takes a list of prompts, each a list of token ids. For padded "
            "rows and their attention_mask there is TreeGenerator."
        )
    if prompts and all(_is_whole(prompt) for prompt in prompts):
        raise InputError("prompts is a flat list of token ids, one prompt; decode_batch takes a list of them: [ids].")
    return [one_prompt(prompt, target, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def request_number(name: str, value: Any) -> int:
    """The number of a sequence.

    Raises:
        InputError: it is no whole number from 0 on.
    """
    return whole(name, value, "the number of a sequence is whole, from 0 to 2**63 - 1", least=0, below=MAX_REQUEST)


def whole(name: str, value: Any, rule: str, *, least: int, below: int | None = None) -> int:
    """A whole number in its range; True and 2.0 are none.

    Raises:
        InputError: names the argument, its value and the rule.
    """
    number = operator.index(value) if _is_whole(value) else None
    if number is None or number < least or (below is not None and number >= below):
        raise InputError(f"{name} is {shown(value)}; {rule}.")
    return number


def end_ids(name: str, ids: Any, target: Target) -> tuple[int, ...]:
    """Ids that end an answer, of one or several; None is the target's own.

    Raises:
        InputError: it holds something else.
    """
    if ids is None:
        return target.eos_token_ids
    if isinstance(ids, torch.Tensor | np.ndarray):
        ids = ids.reshape(-1).tolist()
    listed = [ids] if _is_whole(ids) else ids
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes | Mapping):
        raise InputError(f"{name} is {shown(ids)}; give one token id or a list of them.")
    rule = "token ids are whole numbers from 0 on, and with [] none ends an answer"
    return tuple(whole(name, one, rule, least=0) for one in listed)  # configs name padding ids too: never written


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several; None is none.

    Raises:
        InputError: it holds something else.
    """
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, Mapping | bytes) else None
    if found is None or not all(isinstance(text, str) for text in found):
        raise InputError(f"{name} is {shown(value)}; give a text or a list of texts.")
    return found


def require_parts(target: Any, heads: Any, tree: Any, capacity: Any) -> None:
    """Refuse what no decoder can be made of.

    Raises:
        InputError: names the argument and what makes one.
    """
    if not isinstance(target, Target):
        raise InputError(f"target is {shown(target)}; give what load_target(...) returns.")
    if heads is not None and not isinstance(heads, DraftHeads):
        raise InputError(f"heads is {shown(heads)}; give what load_heads(..., target) returns, or None without a tree.")
    if not isinstance(tree, Tree):
        raise InputError(f"tree is {shown(tree)}; give {_way_to_tree(tree)}.")
    whole("capacity", capacity, "it counts the tokens of prompt and answer, at least 1", least=1)


def _require_known(settings: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in settings:
        if name in known:
            continue
        if name in _OF_RULE:
            raise InputError(
                f"A decoder has no argument {name!r}; how tokens are drawn is one argument, "
                "rule=sampling_rule(temperature=..., seed=...), and without it decoding is greedy."
            )
        raise InputError(f"A decoder has no argument {name!r}; besides max_new_tokens there are {', '.join(known)}.")


def _token_ids(prompt: Any, name: str) -> list[int]:
    if isinstance(prompt, str):
        raise InputError(
            f"{name} is text, and a decoder takes token ids, not text: target.encode_chat(messages) makes them, or "
            "target.tokenizer(text).input_ids."
        )
    if isinstance(prompt, torch.Tensor | np.ndarray):
        if prompt.ndim == 2 and prompt.shape[0] == 1:
            prompt = prompt[0]
        if prompt.ndim != 1:
            raise InputError(f"{_one_at_a_time(name)}, not shape {tuple(prompt.shape)}; decode_batch takes several.")
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InputError(f"{name} is {shown(prompt)}; give its token ids, as a list or a tensor.")
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    for token in prompt:
        if isinstance(token, Sequence | torch.Tensor | np.ndarray) and not _is_whole(token) and type(token) is not str:
            raise InputError(f"{_one_at_a_time(name)}; decode_batch takes several.")
        if not _is_whole(token):
            raise InputError(f"{name} holds {shown(token)}; token ids are whole numbers.")
    return [operator.index(token) for token in prompt]


def _one_at_a_time(name: str) -> str:
    return f"{name} is more than one: a decoder takes one prompt at a time (batch 1 only)"


def _way_to_tree(tree: Any) -> str:
    if isinstance(getattr(tree, "tree", None), Tree):
        return "its .tree, as in read_tree(path).tree"
    if isinstance(tree, list | tuple):
        return "Tree.parse(paths) for a list of rank paths, or Tree.dense([3, 2, 2])"
    return "a Tree, such as read_tree(path).tree or Tree.dense([3, 2, 2]); Tree(()) is plain decoding"


def _is_whole(value: Any) -> bool:
    """As `is_whole`, and of a tensor of no dimension."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return is_whole(value)
