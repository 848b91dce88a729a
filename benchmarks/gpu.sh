#!/usr/bin/env bash
# Everything about the step in one run on one GPU, at most 8 minutes. Not yet run on a GPU.
#
#   benchmarks/gpu.sh [--wheels FOLDER] [--out FOLDER]      on a machine with a GPU
#   benchmarks/gpu.sh --dry-run                             the same path on a CPU, with tiny shapes
#
# Missing Python packages are installed from the folder of wheels, never from an index. Any failure ends the run.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels="" out="benchmarks/results/gpu" dry=""
while (($#)); do
  case "$1" in
    --wheels) wheels="${2:?--wheels needs a folder}"; shift 2 ;;
    --out) out="${2:?--out needs a folder}"; shift 2 ;;
    --dry-run) dry=1; shift ;;
    *) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
  esac
done
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
end=$((SECONDS + 470))
left() { local rest=$((end - SECONDS)); ((rest > 0)) || { echo "gpu.sh: the 8 minutes are over" >&2; exit 3; }; echo "$rest"; }
step() { echo "== $*" >&2; timeout "$(left)" "$@"; }

for package in torch transformers jaxtyping numpy pydantic typer rich safetensors platformdirs scipy; do
  "$python" -c "import $package" 2>/dev/null && continue
  [[ -n "$wheels" ]] || { echo "gpu.sh: the package $package is missing; give --wheels FOLDER" >&2; exit 2; }
  "$python" -m pip install --no-index --find-links "$wheels" "$package" >&2
done

if [[ -n "$dry" ]]; then
  step "$python" benchmarks/gpu.py --shape tiny --device cpu --dtype float32 --widths 1,2,4 --contexts 16,32 \
    --batches 1,2 --out "$out/tiny.json"
  echo "gpu.sh: dry run finished" >&2
  exit 0
fi

"$python" -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'gpu.sh: torch sees no GPU')"
step "$python" benchmarks/gpu.py --shape 1b --seconds 100 --out "$out/llama-1b.json" | tee "$out/llama-1b.md"
step "$python" benchmarks/gpu.py --shape 8b --seconds 180 --out "$out/llama-8b.json" | tee "$out/llama-8b.md"

if "$python" -c "from topo_search.target.gguf import demo_gguf; demo_gguf()" 2>/dev/null; then
  # The text must be that of generate: exactly in fp32, save for listed near-ties in bf16.
  for dtype in float32 bfloat16; do
    step "$python" benchmarks/step.py --device cuda --dtype "$dtype" --out "$out/step-$dtype.json"
    step "$python" -m topo_search bench --device cuda --dtype "$dtype" --tree trees/reference/medusa-63.tree.json \
      --chain trees/reference/medusa-63.tree.json --num-prompts 4 --repeats 1 --json > "$out/bench-$dtype.json"
  done
else
  echo "gpu.sh: the demo target is not at hand, so text equality was not checked" >&2
fi
echo "gpu.sh: finished; results in $out" >&2
