"""What a printed command must name so that it serves the tree."""

from __future__ import annotations

from dataclasses import replace

from topo_search.cli.serving import serving_options
from topo_search.identity import GREEDY, HeadsIdentity, TargetIdentity, sampling_rule, typical_rule

DEMO = TargetIdentity(name="demo", fingerprint="t0", dtype="float32")
MEDUSA = HeadsIdentity(name="demo-medusa", kind="medusa", fingerprint="h0", num_heads=5)


def test_defaults_are_not_named() -> None:
    for mode in (None, "eager", "graph"):
        assert serving_options(DEMO, MEDUSA, GREEDY, mode) == ""


def test_everything_else_is() -> None:
    target, heads = replace(DEMO, name="a/b", dtype="bfloat16"), replace(MEDUSA, name="mine")
    rule = sampling_rule(temperature=0.7, top_k=50, seed=3, noise_share=0.75)
    models = " --target a/b --dtype bfloat16 --heads mine --mode compiled"
    drawn = " --temperature 0.7 --top-k 50 --noise-share 0.75 --seed 3"
    assert serving_options(target, heads, rule, "compiled") == models + drawn
    typical = typical_rule(temperature=0.7, seed=1, epsilon=0.09, delta=0.3, bonus="sampled")
    assert serving_options(DEMO, MEDUSA, typical, None) == (
        " --acceptance typical --epsilon 0.09 --delta 0.3 --bonus sampled --temperature 0.7 --seed 1"
    )
