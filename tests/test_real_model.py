"""The demo target and its heads, for real: a sample of what `benchmarks/equality.py` runs on every prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models import needs_compiler

from topo_search.bench import Contender, Course, RaceResult, race
from topo_search.calibrate import encode_prompts
from topo_search.decode.decoder import TreeDecoder
from topo_search.files.latency_file import read_latency
from topo_search.files.prompts import packaged_prompts
from topo_search.files.trace_file import read_trace
from topo_search.files.tree_file import read_tree
from topo_search.heads import DraftHeads
from topo_search.heads.checkpoints import PACKAGED_HEADS
from topo_search.resources import packaged
from topo_search.search.choose import Settings
from topo_search.search.optimize import optimize
from topo_search.target import Target, load_target
from topo_search.tree import Tree

pytestmark = pytest.mark.real_model

TREES = {
    "plain": Tree(()),
    "best chain": Tree.chain(3),
    "medusa-63": read_tree(packaged("trees/reference/medusa-63.tree.json")).tree,
    "dense": Tree.dense([3, 2, 2]),
}


@pytest.fixture(scope="module")
def sample(demo: Target, demo_heads: DraftHeads) -> RaceResult:
    """Two evaluation prompts of different workloads, raced once against transformers on unpacked weights."""
    chosen = [prompt for prompt in packaged_prompts(workload=None, split="evaluation") if prompt.id.endswith("-003")][
        :2
    ]
    course = Course(
        target=demo,
        reference=load_target("demo", pack=False),
        heads=demo_heads,
        prompts=encode_prompts(demo, chosen, max_new_tokens=32),
        max_new_tokens=32,
        repeats=1,
    )
    contenders = [Contender(name="generate", tree=None), *(Contender(name=n, tree=t) for n, t in TREES.items())]
    return race(course, contenders)


def test_text_and_counts_are_those_of_plain_decoding(sample: RaceResult) -> None:
    assert sample.failures == []
    for standing in sample.standings[1:]:
        assert standing.predicted_tokens_per_step == pytest.approx(standing.tokens_per_step) or standing.mismatches


def test_trees_really_accept(sample: RaceResult) -> None:
    found = {standing.name: standing.tokens_per_step for standing in sample.standings}
    assert found["plain"] == 1.0
    assert found["medusa-63"] > 1.2
    assert found["medusa-63"] >= found["best chain"]


@needs_compiler
def test_compiled_steps_write_what_eager_steps_write(demo: Target, demo_heads: DraftHeads) -> None:
    """Products of its own and torch's, at widths 1, 22 and 64; on this prompt no two scores are nearly equal."""
    compiled = replace(demo, mode="compiled")
    prompt = demo.encode_chat([{"role": "user", "content": "Explain why the sky is blue."}])
    for name, tokens in (("plain", 12), ("dense", 12), ("medusa-63", 6)):
        answers = [
            TreeDecoder(target, demo_heads, TREES[name], run_probe=False).generate(prompt, max_new_tokens=tokens)
            for target in (demo, compiled)
        ]
        assert answers[0].tokens == answers[1].tokens
        assert answers[0].accepted == answers[1].accepted


def test_the_shipped_heads_are_small_and_good(demo: Target, demo_heads: DraftHeads) -> None:
    folder = packaged(PACKAGED_HEADS["demo-medusa"])
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12_000_000
    trace = read_trace(packaged("calibration/demo/demo.trace.safetensors"))
    assert trace.target == demo.identity
    assert trace.heads == demo_heads.identity
    assert optimize(trace, None, Settings(budget=64, objective="tokens-per-step"))["best tree"].tokens_per_step > 1.8


def test_the_shipped_table_fits_the_shipped_trace() -> None:
    trace = read_trace(packaged("calibration/demo/demo.trace.safetensors"))
    latency = read_latency(packaged("calibration/demo/demo.latency.json"))
    assert (latency.target, latency.heads) == (trace.target, trace.heads)
    result = optimize(trace, latency, Settings(budget=64))
    assert result[result.recommended].tokens_per_s == max(found.tokens_per_s or 0 for found in result.alternatives)
