"""The options under which a tree serves what it was made for: models, rule and mode, where they are no defaults."""

from __future__ import annotations

from topo_search.identity import HeadsIdentity, RuleIdentity, TargetIdentity

_RULE_OPTIONS = ("epsilon", "delta", "bonus", "temperature", "top_k", "top_p", "min_p", "noise_share", "seed")
_DEFAULTS = {"target": "demo", "dtype": "float32", "heads": "demo-medusa", "temperature": 0.0, "noise-share": 0.0}


def serving_options(target: TargetIdentity, heads: HeadsIdentity, rule: RuleIdentity, mode: str | None) -> str:
    """Options of `calibrate`, `bench` and `generate`, each behind a space; `mode` is that of the step times, if any.

    How a target is quantised is not among them: its identity names the method, not the option.
    """
    given = {"target": target.name, "dtype": target.dtype, "heads": heads.name}
    if mode == "compiled":  # the one mode that `auto` never means
        given["mode"] = mode
    if rule.changes_text:
        given["acceptance"] = rule.rule
    given |= {name.replace("_", "-"): getattr(rule, name) for name in _RULE_OPTIONS}
    named = {name: value for name, value in given.items() if value is not None and value != _DEFAULTS.get(name)}
    return "".join(f" --{name} {value}" for name, value in named.items())
