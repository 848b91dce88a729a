"""Write questions for the target to answer, so that heads learn from answers to what users ask.

Hand-written forms and fillings (`questions.json`), workloads and forms in turn, fillings at random. None is a prompt
that ships with the package: those are for choosing trees and for judging them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

from topo_search.files.prompts import packaged_prompts

_SLOT = re.compile(r"\{([a-z_]+)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("questions.jsonl"), help="file to write")
    parser.add_argument("--count", type=int, default=3200, help="questions in all")
    parser.add_argument("--seed", type=int, default=0, help="which fillings")
    args = parser.parse_args()
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    rows = questions(content["forms"], content["slots"], count=args.count, seed=args.seed)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"Wrote {args.out}: {len(rows)} questions.")


def questions(
    forms: dict[str, list[str]], slots: dict[str, list[str]], *, count: int, seed: int
) -> list[dict[str, str]]:
    """`count` distinct rows of a prompt file.

    Raises:
        SystemExit: forms and fillings do not make so many.
    """
    known = {
        message["content"]
        for prompt in packaged_prompts(workload=None, split="all")
        for message in prompt.messages or ()
    }
    source = random.Random(seed)
    rows: list[dict[str, str]] = []
    for turn in range(20 * count):
        workload = list(forms)[turn % len(forms)]
        form = forms[workload][turn // len(forms) % len(forms[workload])]
        text = _filled(form, slots, source)
        if text not in known:
            known.add(text)
            rows.append({"workload": workload, "prompt": text})
        if len(rows) == count:
            return rows
    raise SystemExit(f"questions.json makes only {len(rows)} distinct questions of {count}; ask for fewer.")


def _filled(form: str, slots: dict[str, list[str]], source: random.Random) -> str:
    def fill(found: re.Match[str]) -> str:
        value = source.choice(slots[found[1]])
        bounds = _RANGE.fullmatch(value)
        return value if bounds is None else str(source.randint(int(bounds[1]), int(bounds[2])))

    text = _SLOT.sub(fill, form)
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    main()
