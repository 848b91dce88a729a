"""Quantised targets through transformers' own quantisation: by torchao on request, or as a checkpoint already is.

The output layer and the embeddings stay in the target's precision, transformers' default: draft heads share the one,
read the other, and in small models both are one table. Needs the extra `quant` (the `torchao` package).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from topo_search.errors import InputError

QUANTIZATIONS = ("int8", "int4")
_INT4_GROUPS = (128, 64, 32)  # those of torchao's CPU kernel, dearest in accuracy first
# torchao sums int8 products before it scales them, which overflows fp16.
_PRECISIONS = {"int8": ("float32", "bfloat16"), "int4": ("float32", "bfloat16", "float16")}
_NAMED = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bits", "w_bit", "group_size", "weights", "fmt")


def known_quantization(quantize: str | None, *, dtype: str, device: str) -> str | None:
    """The quantisation of that name, checked before anything is loaded.

    Raises:
        InputError: it is unknown, torchao is missing, or precision or device cannot hold it.
    """
    if quantize is None:
        return None
    if quantize not in QUANTIZATIONS:
        raise InputError(
            f"Unknown quantisation {quantize!r}; choose one of {', '.join(QUANTIZATIONS)}. A checkpoint that is "
            "quantised already needs no option."
        )
    if importlib.util.find_spec("torchao") is None:
        raise InputError(f"Quantising to {quantize} needs torchao: pip install 'topo-search[quant]'.")
    if dtype not in _PRECISIONS[quantize]:
        raise InputError(f"{quantize} weights compute in {' or '.join(_PRECISIONS[quantize])}, not in {dtype}.")
    if quantize == "int4" and torch.device(device).type != "cpu":
        raise InputError(
            f"int4 is torchao's prototype for CPUs, not for {device}; give a checkpoint that is quantised for it."
        )
    return quantize


def torchao_settings(quantize: str, model: Any, name: str) -> Any:
    """transformers' quantisation settings for a model of this shape.

    Raises:
        InputError: the model is quantised already, or no group of int4 weights fits any of its layers.
    """
    present = quantization_of(model.config)
    if present is not None:
        raise InputError(f"{name} is quantised already ({present}); leave --quantize out.")
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    if quantize == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    group = _int4_group(model, name)
    return TorchAoConfig(PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False))


def _int4_group(model: nn.Module, name: str) -> int:
    """The largest group that divides every layer's input, else the one that divides most: torchao skips the others."""
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    widths = [m.in_features for m in model.modules() if isinstance(m, nn.Linear) and m is not output]
    fitting = {group: sum(width % group == 0 for width in widths) for group in _INT4_GROUPS}
    most = max(fitting.values())
    if not most:
        raise InputError(
            f"int4 weights come in groups of {', '.join(map(str, _INT4_GROUPS))} inputs, and no linear layer of {name} "
            f"has a multiple of them (it has {sorted(set(widths))}); use int8."
        )
    return next(group for group in _INT4_GROUPS if fitting[group] == most)


def quantization_of(config: Any) -> str | None:
    """How a model's weights are quantised, in a few words that tell one way from another; None for plain weights."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    settings: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    kind = (settings.get("quant_type") or {}).get("default") if method == "torchao" else None
    if kind is None:
        named = [f"{name}={settings[name]}" for name in _NAMED if isinstance(settings.get(name), str | int)]
        return " ".join([method, *(word for word in named if not word.endswith("=False"))])
    data = kind["_data"]
    words = [f"group_size={data['group_size']}"] if data.get("group_size") else []
    if isinstance(data.get("granularity"), dict):
        words.append(str(data["granularity"]["_type"]))
    return " ".join([method, kind["_type"].removesuffix("Config"), *words])


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary tensor of floating-point numbers, not a wrapper around quantised ones."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def dense(weight: Tensor, name: str) -> Tensor:
    """The matrix that a weight stands for, de-quantised where it must be.

    Raises:
        InputError: the weight is packed in a way that only its own layer can read.
    """
    if is_plain(weight):
        return weight.detach()
    if not weight.is_floating_point():
        raise InputError(
            f"The output layer of {name} is quantised as {type(weight).__name__} of {weight.dtype}, which draft heads "
            "cannot share; quantise the model without it."
        )
    matrix: Tensor = weight.dequantize()
    return matrix
