#!/bin/bash
# Commands side by side on the GPUs of one machine, one of them per GPU at a time, until the time is over: what one lease measures.
#
#   bash benchmarks/on_gpus.sh OUT JOBS [LIMIT]
#
# OUT: folder of what the commands print (NAME.txt), and of results where commands name it. JOBS: a file of lines `NAME SECONDS COMMAND`;
# SECONDS is how long the command takes at least: it is not begun where less is left. Empty lines and lines from # on are passed over.
# LIMIT: seconds from now on (570); commands that still run then are ended, and what they wrote stays. GPUS: their numbers (those that
# nvidia-smi lists). In commands, $OUT is OUT and $COMMIT the commit that rows carry (default: git's).
# Called from the root of a checkout; see install_ours.sh.
set -u
[ $# -ge 2 ] && [ -f "$2" ] || { sed -n '2,11p' "$0" | cut -c3-; exit 2; }
OUT=$(mkdir -p "$1" && cd "$1" && pwd) jobs=$2 limit=${3:-570}
export OUT COMMIT=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
GPUS=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')}
[ -n "$GPUS" ] || { echo "no GPU is listed; name their numbers in GPUS"; exit 1; }

said() { echo "[$SECONDS s] $*"; }
left() { echo $((limit - SECONDS)); }

. benchmarks/install_ours.sh
# Python's byte code lies ready where pip installs packages; an image that keeps none would have every process compile its imports.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$(mktemp -d)
said "ours is installed"

queue=$(mktemp -d)
grep -vE '^[[:space:]]*(#|$)' "$jobs" >"$queue/jobs"

# The first job that there is time for leaves the queue: its line is printed. Nothing: there is none.
next() {
  (
    flock 9
    awk -v left="$(left)" '!done && $2 <= left { print > "/dev/stderr"; done = 1; next } { print }' "$queue/jobs" >"$queue/rest" 2>"$queue/taken"
    mv "$queue/rest" "$queue/jobs"
    cat "$queue/taken"
  ) 9>"$queue/lock"
}

serve() {
  local gpu=$1 job name command code
  while job=$(next) && [ -n "$job" ]; do
    name=$(awk '{ print $1 }' <<<"$job") command=$(sed -E 's/^[[:space:]]*[^[:space:]]+[[:space:]]+[^[:space:]]+[[:space:]]+//' <<<"$job")
    CUDA_VISIBLE_DEVICES=$gpu timeout -k 5 "$(left)" bash -c "$command" >"$OUT/$name.txt" 2>&1
    code=$?
    said "GPU $gpu: $name: $([ $code = 0 ] && echo done || echo "exit code $code")"
    tail -n 3 "$OUT/$name.txt" | cut -c1-400
  done
}

for gpu in $GPUS; do serve "$gpu" & done
wait
while read -r name seconds _; do said "no time was left for $name, which takes $seconds s"; done <"$queue/jobs"
rm -rf "$queue" "$PYTHONPYCACHEPREFIX"
said "done"
