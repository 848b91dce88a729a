"""`TreeGenerator`: the habits of transformers' `model.generate(...)` on a tree decoder.

Same names, same shapes, same padding on either side. An argument that makes no sense here is refused by name unless it
holds its neutral value; nothing is read from the model's generation config but its end-of-text ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from topo_search.decode.arguments import end_ids, whole
from topo_search.decode.batch import decode_batch
from topo_search.decode.decoder import TreeDecoder, require_decoder
from topo_search.errors import InputError
from topo_search.identity import GREEDY, RuleIdentity, sampling_rule

# Arguments of transformers that are refused unless neutral: neutral values, and why or what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "a tree verifies one text, not beams"),
    "num_return_sequences": ((1,), "repeat the prompt and give each copy its own seed"),
    "repetition_penalty": ((1.0,), "put transformers' RepetitionPenaltyLogitsProcessor into logits_processor"),
    "no_repeat_ngram_size": ((0,), "put transformers' NoRepeatNGramLogitsProcessor into logits_processor"),
    "length_penalty": ((1.0,), "it scores beams"),
    "assistant_model": ((), "the draft heads draft already"),
    "prompt_lookup_num_tokens": ((), "the draft heads draft already"),
    "stopping_criteria": (([],), "use stop_strings, eos_token_id or max_new_tokens"),
    "prefix_allowed_tokens_fn": ((), "it counts beams; put a logits processor into logits_processor"),
    "generation_config": ((), "pass its settings as arguments"),
    "inputs_embeds": ((), "draft heads need token ids"),
    "past_key_values": ((), "the decoder owns its cache"),
    "cache_implementation": ((), "the decoder owns its cache"),
    "use_cache": ((True,), "a tree is verified behind a cache"),
    "return_dict_in_generate": (
        (False,),
        "use TreeDecoder.generate, which returns every step's accepted tokens",
    ),
    "output_scores": ((False,), "scores are not kept"),
    "output_logits": ((False,), "scores are not kept"),
    "output_attentions": ((False,), "attentions are not kept"),
    "output_hidden_states": ((False,), "hidden states are not kept"),
    "typical_p": ((1.0,), "the filters are top_k, top_p and min_p"),
    "epsilon_cutoff": ((0.0,), "the filters are top_k, top_p and min_p"),
    "eta_cutoff": ((0.0,), "the filters are top_k, top_p and min_p"),
    "penalty_alpha": ((), "contrastive search is another rule"),
}


class TreeGenerator:
    """Wraps a decoder; `generate` returns what `model.generate` would."""

    def __init__(self, decoder: TreeDecoder) -> None:
        require_decoder(decoder)
        self.decoder = decoder

    def generate(
        self,
        input_ids: Int[Tensor, "batch width"],
        attention_mask: Int[Tensor, "batch width"] | None = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        logits_processor: Sequence[Any] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        streamer: Any = None,
        **others: Any,
    ) -> Int[Tensor, "batch longer"]:
        """Prompts and answers, padded on the right with `pad_token_id` (the first end-of-text id, or 0).

        Args:
            input_ids: one prompt per row, padded on either side where `attention_mask` is 0.
            attention_mask: 1 on tokens, 0 on padding; without it every id counts.
            max_new_tokens: exact cap of every answer.
            max_length: the same with the width of `input_ids`; exactly one of the two is given.
            do_sample: draw with temperature, top_k, top_p and min_p, each off unless given; else greedy, with a warning
                where one of them is given all the same.
            temperature, top_k, top_p, min_p: as in transformers.
            seed: of the draws; a row's number in the batch is the number of its sequence.
            eos_token_id: the target's own by default.
            pad_token_id: fills shorter rows.
            logits_processor: see `decode.processors`.
            stop_strings: end an answer that holds one.
            streamer: of transformers, for one prompt.
            **others: any other argument of transformers, as long as it is neutral.

        Raises:
            InputError: an argument is out of range or cannot be honoured; the message names it.
        """
        _require_neutral(others)
        prompts = unpadded(input_ids, attention_mask)
        _require_streamer(streamer, len(prompts))
        cap = _cap(input_ids.shape[1], max_new_tokens, max_length)
        settings: dict[str, Any] = {
            "rule": _rule(do_sample, temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
            "processors": logits_processor,
            "stop_strings": stop_strings,
            "max_new_tokens": cap,
        }
        ends = end_ids("eos_token_id", eos_token_id, self.decoder.target)
        if eos_token_id is not None:
            settings["eos_token_ids"] = ends
        pad = _pad(pad_token_id, ends)
        if len(prompts) == 1:
            answers = [_streamed(self.decoder.stream(prompts[0], **settings), prompts[0], streamer)]
        else:
            answers = [list(answer.tokens) for answer in decode_batch(self.decoder, prompts, **settings)]
        return torch.cat([input_ids, _padded(answers, pad).to(input_ids.device)], dim=1)


def unpadded(
    input_ids: Int[Tensor, "batch width"], attention_mask: Int[Tensor, "batch width"] | None
) -> list[list[int]]:
    """The prompt of every row, without the padding on either side.

    Raises:
        InputError: one is no tensor, shapes differ, a row holds padding only, or padding stands between its tokens.
    """
    for name, given in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(given, Tensor) and not (given is None and name == "attention_mask"):
            raise InputError(f"{name} is a {type(given).__name__}; give a tensor [batch, tokens]: torch.tensor([ids]).")
    if input_ids.ndim != 2:
        raise InputError(f"input_ids has shape {tuple(input_ids.shape)}; it must be [batch, tokens].")
    if not len(input_ids):
        raise InputError("input_ids has no row; give at least one prompt.")
    if attention_mask is None:
        rows: list[list[int]] = input_ids.tolist()
        return rows
    if attention_mask.shape != input_ids.shape:
        raise InputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}; "
            "they must be equal."
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
        seen = torch.nonzero(mask)[:, 0]
        if not len(seen):
            raise InputError(f"Row {row} of input_ids holds padding only; leave it out.")
        first, last = int(seen[0]), int(seen[-1])
        if last - first + 1 != len(seen):
            raise InputError(f"attention_mask of row {row} is 0 between tokens; padding stands before or behind them.")
        prompts.append(ids[first : last + 1].tolist())
    return prompts


def _require_neutral(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _REFUSED:
            raise InputError(f"generate has no argument {name!r} here; see TreeGenerator.generate.")
        neutral, reason = _REFUSED[name]
        if value is not None and value not in neutral:
            raise InputError(f"{name}={value!r} cannot be honoured: {reason}.")


def _cap(width: int, max_new_tokens: int | None, max_length: int | None) -> int:
    if (max_new_tokens is None) == (max_length is None):
        raise InputError("Give exactly one of max_new_tokens and max_length.")
    if max_new_tokens is not None:
        return max_new_tokens
    length = whole("max_length", max_length, "it counts tokens, at least 1", least=1)
    if length <= width:
        raise InputError(f"max_length is {length}, but the prompt takes {width}; give max_new_tokens.")
    return length - width


def _rule(do_sample: bool, temperature: float, **filters: Any) -> RuleIdentity:
    if not isinstance(do_sample, bool):
        raise InputError(f"do_sample is {do_sample!r}; give True to draw or False for greedy decoding.")
    drawn = sampling_rule(temperature=temperature, **filters)
    if do_sample:
        if not drawn.samples:
            raise InputError("temperature is 0.0 with do_sample=True; leave do_sample out for greedy decoding.")
        return drawn
    neutral = {"temperature": (0.0, 1.0), "top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0)}
    given = {"temperature": temperature, **filters}
    idle = [f"{name}={given[name]}" for name, values in neutral.items() if given[name] not in values]
    if idle:
        warnings.warn(  # at the caller of generate
            f"do_sample is not set, so {', '.join(idle)} has no effect and the text is greedy; pass do_sample=True to "
            "draw with it, or leave it out.",
            stacklevel=3,
        )
    return GREEDY


def _require_streamer(streamer: Any, prompts: int) -> None:
    if streamer is None:
        return
    if prompts != 1:
        raise InputError(f"streamer takes one prompt, not {prompts}; leave it out or call row by row.")
    if not (hasattr(streamer, "put") and hasattr(streamer, "end")):
        raise InputError(f"streamer is a {type(streamer).__name__}; give one of transformers, with put and end.")


def _pad(pad_token_id: int | None, ends: Sequence[int]) -> int:
    if pad_token_id is None:
        return next(iter(ends), 0)
    return whole("pad_token_id", pad_token_id, "it is a token id, a whole number from 0 on", least=0)


def _streamed(steps: Any, prompt: Sequence[int], streamer: Any) -> list[int]:
    """All tokens of one answer, each handed to the streamer as transformers does: the prompt, then one at a time."""
    answer: list[int] = []
    if streamer is not None:
        streamer.put(torch.tensor([list(prompt)]))
    for emitted in steps:
        answer += emitted
        if streamer is not None:
            for token in emitted:
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return answer


def _padded(answers: Sequence[Sequence[int]], pad: int) -> Int[Tensor, "batch longest"]:
    longest = max(len(answer) for answer in answers)
    return torch.tensor([[*answer, *[pad] * (longest - len(answer))] for answer in answers])
