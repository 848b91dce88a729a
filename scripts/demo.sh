#!/bin/sh
# The main job on a real model with small settings. $1: the topo-search command.
set -eu
ts=$1
say() { printf '\n== %s\n' "$*"; }

say "topo-search demo: SmolLM2-135M-Instruct with five Medusa heads on this machine, about 5 minutes after set-up."
echo "   Smaller than the defaults: 24 prompts of 64 tokens, edge widths, two contexts, a race over 4 prompts."

say "1/4 Profile the draft heads (about 1 minute; the first run converts the model, 40 s more)"
$ts calibrate --num-prompts 24 --max-new-tokens 64 --no-measure

say "2/4 Measure the decoder's step on this device (about 1 minute)"
$ts measure --quick --max-width 64 --contexts 64,256 --rounds 5

say "3/4 Find the best tree, export its masks, draw it (seconds)"
$ts optimize --budget 64
$ts export trees/best-tree.tree.json --to masks
$ts show trees/best-tree.tree.json

say "4/4 Race it against plain decoding, the text checked token for token (about 2 minutes)"
$ts bench --num-prompts 4 --max-new-tokens 64 --repeats 1

say "Done. The trace and the table are in ./calibration, the trees and masks in ./trees."
cat <<END
Type next:
  $ts generate "Explain why the sky is blue."                 decode with the best tree
  $ts generate "Explain why the sky is blue." --mode compiled    faster steps, where there is a C++ compiler
  $ts calibrate && $ts optimize --budget 64   the full calibration set
  $ts bench --repeats 3                                       the full race, evaluation prompts
END
