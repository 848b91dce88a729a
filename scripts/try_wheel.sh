#!/bin/sh
# Try an installed wheel from a folder that has nothing of the checkout. $1: the environment's bin folder.
set -eu
bin=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"$bin/topo-search" --help >/dev/null
"$bin/python" -m topo_search schema tree >/dev/null
"$bin/topo-search" optimize --budget 64 --json >result.json
"$bin/python" - <<'END'
import json, pathlib
from topo_search.files.prompts import packaged_prompts
from topo_search.resources import packaged
from topo_search.target.compiled import SOURCE
result = json.loads(pathlib.Path("result.json").read_text())
assert result["recommended"] in {"plain", "best chain", "best tree"}, result
assert len(packaged_prompts(workload=None, split="all")) >= 240
for name in ("heads/demo-medusa/heads.safetensors", "trees/reference/medusa-63.tree.json"):
    assert "_data" in packaged(name).parts, packaged(name)
assert SOURCE.is_file(), SOURCE
END
"$bin/topo-search" show trees/best-tree.tree.json >/dev/null
"$bin/topo-search" export trees/best-tree.tree.json --to masks 2>/dev/null
test -s trees/best-tree.masks.safetensors
echo "wheel: help, schema, optimize, show, export and packaged files work from another folder"
