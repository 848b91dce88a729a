"""Medusa-2: heads and target trained together (arXiv 2401.10774, section 2.2.2), the target through low-rank adapters.

The loss is L_LM + heads_weight * sum over k of head_decay ** (k - 1) * L_k. Heads are warmed up first, the target
frozen (`training.heads`), and the backbone learns more slowly than they do. Where the text that the target was made
with is not at hand, L_LM is the KL divergence from the original target (self-distillation, section 2.3.2), whose
distribution follows from its cached hidden states; the output layer and the embeddings are not adapted.

The result is another target: `merged` makes it, `drift` tells how far it is from the original.
"""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from topo_search.answers import answer_batch
from topo_search.compare import first_difference
from topo_search.errors import InputError
from topo_search.target.adapter import Target
from topo_search.target.load import make_target
from topo_search.training.batches import (
    Batch,
    load_batch,
    rows_of,
    seeded,
    steps_per_epoch,
    texts_of_step,
    usable_texts,
)
from topo_search.training.checkpoint import read_checkpoint, require_finite, write_checkpoint
from topo_search.training.heads import Corpus, schedule
from topo_search.training.loss import HeadLoss
from topo_search.training.states import HiddenStates
from topo_search.training.text import TrainingText, answer_positions

LanguageLoss = Literal["original", "text"]

_SAVE_SECONDS = 60.0
_DRIFT_PROMPTS = 32
_DRIFT_TOKENS = 64
_ROWS_AT_ONCE = 256
_PROMPTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRecipe:
    """Everything that decides the result besides target, text, and the warmed-up heads.

    Attributes:
        epochs: passes over the text, heads and target together.
        batch_texts: texts per step.
        learning_rate: the heads' peak; linear warm-up, cosine decay.
        backbone_learning_rate: the adapters' peak; smaller, so that the target keeps its abilities.
        weight_decay: AdamW's.
        heads_weight: weight of the heads' losses beside the language loss, the paper's lambda_0.
        head_decay: loss weight of head k is head_decay ** (k - 1).
        language_loss: `original`, KL from the original target; `text`, cross-entropy with the text's tokens.
        lora_rank, lora_alpha: of the adapters on every linear layer but the output layer.
        sampled_tokens: negatives per step for the heads; 0 scores every token.
        seed: order of texts, negatives, adapters.
        started_from: fingerprint of the heads that were trained before; None: warmed up for this run.
    """

    epochs: int = 1
    batch_texts: int = 8
    learning_rate: float = 1e-3
    backbone_learning_rate: float = 2.5e-4
    weight_decay: float = 0.0
    heads_weight: float = 0.2
    head_decay: float = 0.8
    language_loss: LanguageLoss = "original"
    lora_rank: int = 32
    lora_alpha: int = 16
    sampled_tokens: int = 2048
    seed: int = 0
    started_from: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JointReport:
    """Where a run stands: mean language loss and mean loss per head over a step's rows."""

    step: int
    steps: int
    language_loss: float
    loss_per_head: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far a target moved from its original, on text that it was not trained on.

    Attributes:
        kl: mean KL divergence from the original's next-token distribution, over answer positions, in nats.
        positions: answer positions compared.
        equal_text: share of prompts whose greedy texts are equal.
        equal_leading_tokens: mean share of leading greedy tokens that are equal.
        prompts: prompts whose texts were compared.
        new_tokens: cap of those texts.
    """

    kl: float
    positions: int
    equal_text: float
    equal_leading_tokens: float
    prompts: int
    new_tokens: int


Report = Callable[[JointReport], None]


def require_peft() -> Any:
    """The library peft.

    Raises:
        InputError: it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise InputError("Medusa-2 needs the extra `lora`: pip install 'topo-search[lora]'.") from None
    return peft


class Adapted:
    """A target with trainable low-rank adapters inside; without them it is the original still."""

    def __init__(self, target: Target, *, rank: int, alpha: int, seed: int) -> None:
        """Put adapters that change nothing yet into the target's model.

        Raises:
            InputError: the library peft is missing, or the target's weights are packed for inference or quantised.
        """
        if target.identity.quantization is not None:
            raise InputError(
                f"The weights of {target.identity.name} are quantised ({target.identity.quantization}) and cannot be "
                "merged with what they learn; train the unquantised model, or heads alone (topo-search train medusa)."
            )
        if target.packed:
            raise InputError(
                f"The weights of {target.identity.name} are packed for inference; load it with pack=False."
            )
        peft = require_peft()
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0)
        self.target = target
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft asks transformers in ways that newer versions call deprecated
            self._wrapped: Any = peft.get_peft_model(target.model, settings)
        self._wrapped.eval()  # the target's own dropout stays off

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The adapters' weights by name."""
        return {name: weight for name, weight in self._wrapped.named_parameters() if weight.requires_grad}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Take weights over."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])

    def original(self) -> AbstractContextManager[None]:
        """While it is open the target is the original."""
        context: AbstractContextManager[None] = self._wrapped.disable_adapter()
        return context

    def merged(self, name: str) -> Target:
        """The new target, adapters merged into its weights; nothing is left to be trained."""
        model = self._wrapped.merge_and_unload()
        return make_target(model, self.target.tokenizer, name=name, dtype=self.target.identity.dtype, pack=False)


def train_jointly(
    adapted: Adapted,
    loss: HeadLoss,
    corpus: Corpus,
    recipe: JointRecipe,
    *,
    num_heads: int,
    checkpoint: Path | None = None,
    report: Report | None = None,
) -> float:
    """Train the adapters and the heads of `loss` in place; returns the seconds spent, interrupted runs included.

    Args:
        adapted: the target with fresh adapters.
        loss: warmed-up heads.
        corpus: text with the *original* target's states; its `epochs` are not read.
        recipe: settings and seed.
        num_heads: draft heads.
        checkpoint: file that a killed run continues from, written every minute and at the end; the caller removes it
            once the result is safe.
        report: called after every step.

    Raises:
        InputError: no text has a position with a label, the loss is not a number, the disk is full, or `checkpoint` is
            of other settings. The last checkpoint stays.
    """
    run = _Run.start(adapted, loss, corpus, recipe, num_heads, checkpoint)
    saved = time.monotonic()
    while run.step < run.steps:
        clock = time.perf_counter()
        at = run.descend()
        run.seconds += time.perf_counter() - clock
        if checkpoint and (run.step == run.steps or time.monotonic() - saved >= _SAVE_SECONDS):
            run.save(checkpoint)
            saved = time.monotonic()
        if report:
            report(at)
    return run.seconds


@dataclass(slots=True)
class _Run:
    """Model, optimiser and place in one run."""

    adapted: Adapted
    loss: HeadLoss
    corpus: Corpus
    usable: Int[Tensor, " texts"]
    recipe: JointRecipe
    num_heads: int
    optimizer: torch.optim.Optimizer
    checkpoint: Path | None
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def start(
        cls,
        adapted: Adapted,
        loss: HeadLoss,
        corpus: Corpus,
        recipe: JointRecipe,
        num_heads: int,
        checkpoint: Path | None,
    ) -> _Run:
        usable = usable_texts(corpus.text)
        if not len(usable):
            raise InputError("The training text has 0 supervised tokens: every answer is one token long.")
        groups = [
            {"params": list(loss.train().parameters()), "peak": recipe.learning_rate},
            {"params": list(adapted.weights.values()), "peak": recipe.backbone_learning_rate},
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=recipe.weight_decay, betas=(0.9, 0.98))
        run = cls(adapted, loss, corpus, usable, recipe, num_heads, optimizer, checkpoint)
        if checkpoint and (state := read_checkpoint(checkpoint, run._settings())):
            loss.blocks.load_state_dict(state["blocks"])
            adapted.load(state["adapters"])
            optimizer.load_state_dict(state["optimizer"])
            run.step, run.seconds = state["step"], state["seconds"]
        return run

    @property
    def steps(self) -> int:
        return self.recipe.epochs * steps_per_epoch(self.usable, self.recipe.batch_texts)

    def descend(self) -> JointReport:
        """One step."""
        recipe = self.recipe
        texts = texts_of_step(self.usable, self.step, batch_texts=recipe.batch_texts, seed=recipe.seed)
        labels = rows_of(self.corpus.text, texts, self.num_heads).labels
        candidates = self.loss.candidates(labels, recipe.sampled_tokens, seeded(recipe.seed, self.step, 7))
        original = load_batch(self.corpus.text, self.corpus.states, texts, self.num_heads, whole=True)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(self.step, self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        batch = replace(original, states=self._live_states(texts))
        language = self._language_loss(texts, original, batch)
        sums = self.loss(batch, candidates)
        means = sums / self.loss.supervised(labels).to(sums.device).clamp(min=1)
        weights = recipe.head_decay ** torch.arange(self.num_heads, device=sums.device)
        total = language + recipe.heads_weight * (weights * means).sum()
        total.backward()
        norm = nn.utils.clip_grad_norm_([w for group in self.optimizer.param_groups for w in group["params"]], 1.0)
        require_finite(total.detach(), norm, step=self.step, checkpoint=self.checkpoint)
        self.optimizer.step()
        self.step += 1
        return JointReport(
            step=self.step,
            steps=self.steps,
            language_loss=float(language.detach()),
            loss_per_head=tuple(means.detach().tolist()),
        )

    def _live_states(self, texts: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen positions hidden"]:
        """The adapted target's states of whole texts, padded on the right as `load_batch` pads."""
        parts = _tokens_of(self.corpus.text, texts)
        ids = nn.utils.rnn.pad_sequence(parts, batch_first=True)
        return self.adapted.target.hidden_states(ids.to(self.adapted.target.device)).float()

    def _language_loss(self, texts: Int[Tensor, " chosen"], original: Batch, live: Batch) -> Float[Tensor, ""]:
        """Mean over the answers' tokens of the loss of the states that chose them."""
        rows, tokens = _answer_rows(self.corpus.text, texts, live.states.shape[1])
        target = self.adapted.target
        logs = _log_probs(target, live.states.flatten(0, 1)[rows.to(live.states.device)])
        if self.recipe.language_loss == "text":
            return functional.nll_loss(logs, tokens.to(logs.device))
        with torch.no_grad():
            wanted = _log_probs(target, original.states.flatten(0, 1)[rows].to(logs.device))
        return functional.kl_div(logs, wanted, log_target=True, reduction="batchmean")

    def save(self, path: Path) -> None:
        """Write where the run stands."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "blocks": self.loss.blocks.state_dict(),
            "adapters": {name: weight.detach() for name, weight in self.adapted.weights.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        write_checkpoint(path, self._settings(), state)

    def _settings(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe),
            "texts": self.corpus.text.digest,
            "target": asdict(self.adapted.target.identity),
            "heads": str(self.loss.blocks.shape),
            "adapters": {name: list(weight.shape) for name, weight in self.adapted.weights.items()},
            "columns": self.loss.columns,
        }


def greedy_texts(target: Target, text: TrainingText) -> list[tuple[int, ...]]:
    """The target's greedy answers, up to 64 tokens, to the first 32 prompts of `text` that leave room for them."""
    prompts = [tuple(prompt.tolist()) for prompt in _prompts_with_room(target, text)[:_DRIFT_PROMPTS]]
    answers = []
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        answers += answer_batch(target, prompts[start : start + _PROMPTS_AT_ONCE], max_new_tokens=_DRIFT_TOKENS)
    return [answer.tokens for answer in answers]


def drift(
    target: Target,
    text: TrainingText,
    *,
    original_states: HiddenStates,
    states: HiddenStates,
    original_texts: list[tuple[int, ...]],
) -> Drift:
    """How far `target` is from its original, whose output layer it shares.

    Args:
        target: the new target.
        text: held-out text.
        original_states, states: the original's and the new target's states of it.
        original_texts: `greedy_texts` of the original.
    """
    rows = answer_positions(text) - 1
    total = 0.0
    with torch.inference_mode():
        for part in rows.split(_ROWS_AT_ONCE):
            before, after = (
                _log_probs(target, kept.rows(part).to(target.device)) for kept in (original_states, states)
            )
            total += float(functional.kl_div(after, before, log_target=True, reduction="sum"))
    shares = [
        1.0 if (at := first_difference(before, after)) is None else at / max(len(before), len(after))
        for before, after in zip(original_texts, greedy_texts(target, text), strict=True)
    ]
    count = max(len(shares), 1)
    return Drift(
        kl=total / max(len(rows), 1),
        positions=len(rows),
        equal_text=sum(share == 1.0 for share in shares) / count,
        equal_leading_tokens=sum(shares) / count,
        prompts=len(shares),
        new_tokens=_DRIFT_TOKENS,
    )


def save_target(target: Target, folder: Path) -> None:
    """Write the target as a transformers folder: weights, configuration, generation settings, tokenizer.

    Raises:
        InputError: the folder cannot be written; one that was there is kept until the new one is whole.
    """
    scratch = folder.with_name(f".{folder.name}.writing")
    model: Any = target.model
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        model.save_pretrained(scratch)
        target.tokenizer.save_pretrained(scratch)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.replace(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise InputError(f"The new target cannot be written to {folder} ({error}); start again to continue.") from None


def _log_probs(target: Target, states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
    scores: Tensor = target.output_layer(states.to(target.dtype))
    return functional.log_softmax(scores.float(), dim=-1)


def _answer_rows(
    text: TrainingText, texts: Int[Tensor, " chosen"], width: int
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Where the answers' tokens were chosen, in texts padded to `width` and flattened, and which they are."""
    rows, tokens = [], []
    for number, part in enumerate(_tokens_of(text, texts)):
        prompt = int(text.prompt_lengths[texts[number]])
        rows.append(number * width + torch.arange(prompt - 1, len(part) - 1))
        tokens.append(part[prompt:])
    return torch.cat(rows), torch.cat(tokens)


def _tokens_of(text: TrainingText, texts: Int[Tensor, " chosen"]) -> list[Tensor]:
    return [text.tokens[int(text.starts[i]) : int(text.starts[i + 1])] for i in texts.tolist()]


def _prompts_with_room(target: Target, text: TrainingText) -> list[Tensor]:
    parts = text.tokens.split(text.lengths.tolist())
    prompts = [part[:length] for part, length in zip(parts, text.prompt_lengths.tolist(), strict=True)]
    limit = target.position_limit
    return [prompt for prompt in prompts if limit is None or len(prompt) + _DRIFT_TOKENS <= limit]
