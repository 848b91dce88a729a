"""What training tests share: a tiny fp32 target, text it wrote, the text's states, untrained heads of every family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from folders import word_tokenizer
from models import PROMPTS, llama_config, tiny_model
from torch import Tensor, nn

from topo_search.answers import answer_batch
from topo_search.heads.attention import LayerShape
from topo_search.heads.hydra import HydraShape, untrained_hydra
from topo_search.heads.medusa import untrained_blocks
from topo_search.target import Target
from topo_search.target.load import make_target
from topo_search.training.heads import Corpus
from topo_search.training.loss import HeadLoss, shorten_projection
from topo_search.training.states import HiddenStates
from topo_search.training.text import TrainingText, text_of

HEADS = 3
FAMILIES = ("medusa", "hydra", "guide", "fusion", "hydra++")


@cache
def learner() -> Target:
    """The tiny Llama in fp32 with a tokenizer that has a chat template; id 51 ends its answers."""
    model = tiny_model(llama_config(), dtype=torch.float32)
    model.generation_config.eos_token_id = 51
    return make_target(model, word_tokenizer(), name="learner", dtype="float32")


@cache
def own_text() -> TrainingText:
    """What that target answers to the prompts of the tests, of unequal lengths."""
    prompts = [*PROMPTS, (8, 9), (10, 11, 12), (13,), (14, 15, 16, 17), (18, 3)]
    answers = answer_batch(learner(), prompts, max_new_tokens=24)
    texts = [torch.tensor([*prompt, *answer.tokens]) for prompt, answer in zip(prompts, answers, strict=True)]
    return text_of(texts, [len(prompt) for prompt in prompts])


def states_of(text: TrainingText) -> HiddenStates:
    """The states of a text by one plain forward pass per text, rounded as the cache on disk rounds them."""
    parts = [plain_states(one) for one in texts_of(text)]
    return HiddenStates(np.concatenate([part.half().numpy() for part in parts]))


def plain_states(tokens: Tensor) -> Tensor:
    """The hidden states of one text, nothing cached or padded."""
    with torch.inference_mode():
        return learner().hidden_states(tokens[None])[0].clone()


def texts_of(text: TrainingText) -> Sequence[Tensor]:
    """Each text's tokens."""
    return text.tokens.split(text.lengths.tolist())


def corpus(epochs: int = 1) -> Corpus:
    """The text with its states."""
    return Corpus(text=own_text(), states=states_of(own_text()), epochs=epochs)


def fresh(family: str, *, own_projection: bool = False, moved: bool = False) -> nn.Module:
    """Untrained heads of a family; `moved` away from their starting point, so that every part counts."""
    target = learner()  # first, since making it draws too, and it is made once a process
    torch.manual_seed(5)
    if family == "medusa":
        blocks: nn.Module = untrained_blocks(target, num_heads=HEADS, num_layers=2, share_projection=not own_projection)
    else:
        layer = LayerShape.of(target) if family in ("fusion", "hydra++") else None
        shape = HydraShape(
            hidden=target.hidden_size,
            num_heads=HEADS,
            num_layers=2 if family == "hydra++" else 1,
            arch="guide" if family == "guide" else "mlp",
            sees="fusion" if family == "fusion" else "path",
            prefix_attention=family == "hydra++",
            root_in_prefix=family == "hydra++",
            layer=layer,
        )
        blocks = untrained_hydra(target, shape, share_projection=not own_projection)
    blocks = blocks.float()
    if moved:
        with torch.no_grad():
            for parameter in blocks.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return blocks


def loss_of(blocks: nn.Module, *, token_map: Tensor | None = None, distill: float = 0.0) -> HeadLoss:
    """Its loss against the tiny target."""
    shorten_projection(blocks, token_map)
    return HeadLoss(blocks, learner().output_weight, learner().input_embeddings, token_map=token_map, distill=distill)
