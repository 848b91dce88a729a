"""Weights packed once for oneDNN: on a CPU an unpacked branch costs 1.6 plain steps, so no tree could win.

`torch.ops.mkldnn._reorder_linear_weight` and `_linear_pointwise` are private, hence this one file, a capability
check that runs them, and a plain fallback.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from topo_search.target.quantization import is_plain

_WIDTH_HINT = 16  # the layout oneDNN picks for it serves every width from 1 on


class PackedLinear(nn.Module):
    """A frozen `nn.Linear` whose weight lies in oneDNN's blocked layout. Inference only.

    `packed` is that weight; `weight` is kept beside it where training needs the plain matrix (the output layer), else
    None.
    """

    def __init__(self, linear: nn.Linear, *, keep_weight: bool = False) -> None:
        super().__init__()
        self.weight = linear.weight if keep_weight else None
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _WIDTH_HINT)
        # Looked up once: a step calls products a hundred times, and each name on the way costs it microseconds.
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_plus = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, inputs: Tensor) -> Tensor:
        """Same as the linear layer it replaces."""
        output: Tensor = self._product(inputs, self.packed, self.bias, "none", [], "")
        return output

    __call__ = forward  # without torch's hooks

    def plus(self, inputs: Tensor, residual: Tensor) -> Tensor:
        """The same plus `residual`, in one operation."""
        output: Tensor = self._product_plus(inputs, residual, self.packed, self.bias, "add")
        return output


@cache
def can_pack() -> bool:
    """Whether this torch build packs fp32 linear weights and computes with them what it should."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    linear = nn.Linear(64, 96)
    inputs = torch.arange(3 * 64, dtype=torch.float32).reshape(3, 64) / 64
    try:
        with torch.inference_mode():
            packed = PackedLinear(linear)(inputs)
            return torch.allclose(packed, functional.linear(inputs, linear.weight, linear.bias), atol=1e-4)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False


def pack_linears(model: nn.Module, *, output_layer: nn.Module | None = None) -> int:
    """Replace every fp32 CPU linear layer of `model` by a packed one, quantised ones excepted; returns how many.

    The unpacked weights are released, save that of `output_layer`, which draft heads copy and train against. Zero
    where the build cannot pack.
    """
    if not can_pack():
        return 0
    packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and is_packable(child.weight):
                setattr(parent, name, PackedLinear(child, keep_weight=child is output_layer))
                packed += 1
    return packed


def is_packable(weight: Tensor) -> bool:
    """Whether a weight is an fp32 matrix on a CPU, and not a quantised one in its place."""
    return is_plain(weight) and weight.dtype == torch.float32 and weight.device.type == "cpu"
