#!/usr/bin/env bash
# On a machine with two GPUs and PyTorch, nothing prepared beforehand:
#  1. a 2-rank training with two process groups hangs; only then `inspect`, and
#     `attach` + `analyze`, name the rank;
#  2. the tracer comes in mid-training at another moment for each rank, then one
#     rank stalls: the sequences agree between the ranks;
#  3. step time of a training with and without probes, alternating.
# Usage: tools/gpu/late_attach.sh OUT_DIR
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
probe=${NCCLUPROBE:-nccluprobe}
work=$(mktemp -d)
log=$out/late_attach.txt
exec > >(tee "$log") 2>&1

train() { # NAME ARGUMENTS...
  local name=$1
  shift
  NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$work/$name.nccl.%p.log" TORCH_NCCL_ASYNC_ERROR_HANDLING=0 \
    torchrun --standalone --nproc-per-node 2 "$here/ddp_stall.py" "$@" > "$work/$name.log" 2>&1
}
ranks() { pgrep -f 'python.* [^ ]*ddp_stall.py' | while read -r pid; do
  tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -q '^LOCAL_RANK=' && echo "$pid"
done; }
until_in() { for _ in $(seq 300); do grep -q "$1" "$2" 2> /dev/null && return; sleep 0.2; done; return 1; }

echo "== 1. a hung job, nothing prepared"
train hung --stall-rank 1 --stall-at 25 --hold 70 &
job=$!
until_in 'stalls before' "$work/hung.log"
sleep 6
echo "\$ nccluprobe inspect PIDS"
# shellcheck disable=SC2046
time $probe inspect $(ranks) || true
mkdir -p "$work/t1/tracing/hung"
echo "\$ nccluprobe inspect --json PIDS; nccluprobe attach --pid-glob python --duration 8;"
echo "  nccluprobe inspect --json PIDS; nccluprobe analyze --missing-after 3 --error-after 5"
# shellcheck disable=SC2046
$probe inspect --json $(ranks) > "$work/t1/tracing/hung/inspect1.jsonl" || true
$probe attach --pid-glob python --run-id hung --out "$work/t1" --duration 8
# shellcheck disable=SC2046
$probe inspect --json $(ranks) > "$work/t1/tracing/hung/inspect2.jsonl" || true
$probe analyze "$work/t1" --missing-after 3 --error-after 5 || echo "exit code $?"
pkill -KILL -f ddp_stall.py || true
wait $job || true
echo "NCCL's own log:"
grep -ho 'commId 0x[0-9a-f]*' "$work"/hung.nccl.*.log | sort | uniq -c

echo "== 2. attached in mid-training, each rank at another moment"
train mid --steps 100000 --pause 0.05 --stall-rank 1 --stall-after 25 --hold 70 &
job=$!
until_in 'first step' "$work/mid.log"
mapfile -t pids < <(ranks)
sleep 2
$probe attach --pid "${pids[0]}" --out "$work/t2a" --duration 31 2> "$work/a.log" &
sleep 5
$probe attach --pid "${pids[1]}" --out "$work/t2b" --duration 26 2> "$work/b.log" &
until_in 'stalls before' "$work/mid.log"
sleep 9
$probe analyze "$work/t2a" "$work/t2b" --missing-after 3 --error-after 5 || echo "exit code $?"
grep -h '"kind":"comm"' "$work"/t2?/tracing/*/*.jsonl || true
pkill -KILL -f ddp_stall.py || true
wait $job || true

echo "== 3. step time without and with probes, alternating"
for round in 1 2 3; do
  train "bare$round" --steps 1500 --hold 60 || true
  echo "bare    $(grep 'steps in' "$work/bare$round.log")"
  $probe attach --pid-glob python --out "$work/t3" 2> "$work/c$round.log" &
  attach=$!
  until_in ready "$work/c$round.log"
  train "probed$round" --steps 1500 --hold 60 || true
  echo "probed  $(grep 'steps in' "$work/probed$round.log")"
  kill -INT $attach
  wait $attach || true
done
cp "$work"/t1/tracing/hung/inspect2.jsonl "$out/inspect.jsonl" 2> /dev/null || true
