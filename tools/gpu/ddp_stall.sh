#!/usr/bin/env bash
# On a machine with two GPUs and PyTorch: attach first, then a 2-rank DDP
# training in which rank 1 stalls; then analyze. Compares the communicator
# hashes of the trace with NCCL's own log. Needs root, BCC and nccluprobe's
# Python packages. Usage: tools/gpu/ddp_stall.sh OUT_DIR
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
probe=${NCCLUPROBE:-nccluprobe}
trace=$(mktemp -d)

{
  uname -r
  python3 -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__, "nccl", torch.cuda.nccl.version())'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
} | tee "$out/versions.txt"

$probe attach --pid-glob python --out "$trace" 2> "$out/attach.log" &
attach=$!
trap 'kill $attach 2>/dev/null || true' EXIT
for _ in $(seq 100); do grep -q 'ready' "$out/attach.log" && break; sleep 0.2; done

NCCL_DEBUG=INFO NCCL_DEBUG_FILE="$trace/nccl.%p.log" TORCH_NCCL_ASYNC_ERROR_HANDLING=0 \
  torchrun --standalone --nproc-per-node 2 "$here/ddp_stall.py" \
  --stall-rank 1 --stall-at 30 --hold 45 > "$out/train.log" 2>&1 &
train=$!
for _ in $(seq 200); do grep -q 'stalls before' "$out/train.log" && break; sleep 0.2; done
sleep 12
echo '$ nccluprobe analyze OUT --missing-after 5 --error-after 10' | tee "$out/analyze.txt"
$probe analyze "$trace" --missing-after 5 --error-after 10 2>&1 | tee -a "$out/analyze.txt" || true
kill -INT $attach
wait $attach || true
wait $train || true

grep -h 'commId 0x.*Init COMPLETE' "$trace"/nccl.*.log | tee "$out/nccl_log.txt" | head -8
grep -ho 'commId 0x[0-9a-f]*' "$out/nccl_log.txt" | sed 's/commId 0x//' | sort -u > "$out/hashes_nccl.txt"
cat "$trace"/tracing/*/rank_*.jsonl | grep '"kind":"comm"' | grep -o '"hash":"[0-9a-f]*"' \
  | cut -d'"' -f4 | sort -u > "$out/hashes_trace.txt"
echo "hashes in NCCL's log: $(tr '\n' ' ' < "$out/hashes_nccl.txt")"
echo "hashes in the trace:  $(tr '\n' ' ' < "$out/hashes_trace.txt")"
while read -r hash; do
  # NCCL prints the number without leading zeros.
  grep -q "^0*${hash}\$" "$out/hashes_trace.txt" || { echo "not in the trace: $hash"; exit 1; }
done < "$out/hashes_nccl.txt"
for file in "$trace"/tracing/*/rank_*.jsonl; do
  { head -20 "$file"; echo '...'; tail -8 "$file"; } > "$out/$(basename "$file").excerpt"
  wc -l "$file"
done
