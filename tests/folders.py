"""A tiny target and tiny heads as folders on disk, for the command line."""

from __future__ import annotations

from pathlib import Path

import torch
from models import llama_config, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GenerationConfig, PreTrainedTokenizerFast

from topo_search.heads import save_heads
from topo_search.heads.medusa import untrained_blocks
from topo_search.target import load_target

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}answer{% endif %}"
)


def word_tokenizer(*, chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Sixty words; id 1 ends a text."""
    words = ["<unk>", "<end>", "user", "system", "answer", *(f"w{number}" for number in range(56))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    fast.chat_template = chat_template
    return fast


def save_tiny_target(folder: Path, *, seed: int = 7) -> Path:
    """A tiny Llama in fp32 with a tokenizer, 128 positions."""
    model = tiny_model(llama_config(max_position_embeddings=128), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(seed - 7)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=1)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_heads(folder: Path, target_folder: Path, *, num_heads: int = 3, scale: float = 0.02) -> Path:
    """Heads near their untrained state, trained (so they say) for the target in `target_folder`."""
    target = load_target(str(target_folder))
    blocks = untrained_blocks(target, num_heads=num_heads, num_layers=1, share_projection=True)
    torch.manual_seed(3)
    with torch.no_grad():
        blocks.weight.normal_(std=scale)
    record = {"base_model_name_or_path": "tiny", "target_fingerprint": target.identity.fingerprint}
    save_heads(folder, blocks, record, dtype=torch.float32)
    return folder
