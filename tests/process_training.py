"""What `accelerate launch` runs in tests: training runs whose weights the first process writes down."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from learning import HEADS, corpus, fresh, loss_of
from safetensors.torch import save_file
from torch import nn

from topo_search.training.heads import Recipe, train_heads

FAMILIES = ("medusa", "hydra++")
RECIPE = Recipe(batch_texts=4, learning_rate=1e-3, sampled_tokens=20, distill=0.5)


def trained(family: str, checkpoint: Path, accelerator: Any = None) -> nn.Module:
    """Heads of a family, with own projections; the nine texts leave the last step of an epoch with one."""
    blocks = fresh(family, own_projection=True, moved=True)
    loss = loss_of(blocks, distill=RECIPE.distill)
    train_heads(loss, [corpus(4)], RECIPE, num_heads=HEADS, checkpoint=checkpoint, accelerator=accelerator)
    return blocks


def main() -> None:
    """Train every family in the folder that is the only argument."""
    from accelerate import Accelerator

    assert os.environ["WORLD_SIZE"] == "2"
    folder, accelerator = Path(sys.argv[1]), Accelerator(cpu=True)
    for family in FAMILIES:
        blocks = trained(family, folder / f"{family}.pt", accelerator)
        digest = torch.stack([parameter.double().sum() for parameter in blocks.parameters()]).sum()
        everyone = accelerator.gather(digest[None])
        assert bool((everyone == everyone[0]).all()), "processes ended in different weights"
        if accelerator.is_main_process:
            tensors = {name: tensor.contiguous() for name, tensor in blocks.state_dict().items()}
            save_file(tensors, folder / f"{family}.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
