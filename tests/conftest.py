"""Shared fixtures: shape checks switched on for the whole package, tiny random models, the real demo target."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook("topo_search", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from models import tiny_heads, tiny_llama  # noqa: E402

from topo_search.heads import DraftHeads  # noqa: E402
from topo_search.heads.medusa import MedusaHeads  # noqa: E402
from topo_search.target import Target, load_target  # noqa: E402


@pytest.fixture(scope="session")
def tiny() -> Target:
    """A tiny Llama with grouped-query attention in float64."""
    return tiny_llama()


@pytest.fixture(scope="session")
def tiny_medusa(tiny: Target) -> MedusaHeads:
    """Random heads for it: their guesses are often right, since a tiny random model repeats itself."""
    return tiny_heads(tiny)


@pytest.fixture(scope="session")
def demo() -> Target:
    """The real demo target, packed."""
    return load_target("demo")


@pytest.fixture(scope="session")
def demo_heads(demo: Target) -> DraftHeads:
    """The heads that ship for it."""
    from topo_search.heads import load_heads

    return load_heads("demo-medusa", demo)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
