#!/bin/bash
# Peers and ours on a machine with a GPU and without a network: install both, try vLLM alone, then measure whole generations.
#
#   bash benchmarks/peers/on_gpu.sh FOLDER COMMIT [arguments of benchmarks/sweep.py]
#
# FOLDER: install.sh and the archives of peers; install.sh sets VL, the folder that holds vLLM. Wheels of what else is missing may lie in .whl.
# LIMIT: seconds of all this (570). TRY: peers that are tried alone before (vllm; empty: none). RESULTS: where sweep.json is continued.
# Where OUT is set, it is continued there from a copy, so that what was measured is there also when this is ended early.
set -u
LIMIT=${LIMIT:-570} TRY=${TRY-vllm} RESULTS=${RESULTS:-benchmarks/results/h200}
folder=$1 commit=$2
shift 2
models=()
while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do models+=("$1"); shift; done
[ ${#models[@]} -gt 0 ] || models=(qwen3-1.7b)
[ $# -gt 0 ] || set -- --workloads 128/128,2048/512 --repetitions 5 --search-s 100

said() { echo "[$SECONDS s] $*"; }

if [ -n "${OUT:-}" ]; then
  [ ! -e "$RESULTS/sweep.json" ] || cp "$RESULTS/sweep.json" "$OUT/"
  RESULTS=$OUT
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
. "$folder/install.sh" "$folder" || exit 1
said "peers are unpacked"
. benchmarks/install_ours.sh
said "ours is installed"
if [ -n "$TRY" ]; then
  python3 benchmarks/peer_check.py "${models[0]}" --peers "$TRY" --peer-path "$VL" || said "a peer failed: its rows will say so"
  said "peers were tried"
fi
python3 benchmarks/sweep.py "${models[@]}" --peer-path "$VL" --commit "$commit" --out "$RESULTS" --budget-s $((LIMIT - SECONDS)) "$@"
code=$?
said "done"
exit $code
