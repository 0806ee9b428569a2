#!/usr/bin/env bash
# On a machine with two GPUs: the canary on real NCCL, traced.
#  a. all operations and datatypes are right, with times and bandwidths
#  b. the two-rank all_reduce equals ncclAllReduce within rounding
#  c. abort and reconnect: two communicators in the trace, no finding
#  d. faults are planted one after another and named
#  e. cost of the probes per call, and the rate of small messages with and without
# Usage: tools/gpu/canary.sh OUT_DIR [PART...]
#   NCCLUPROBE        the command, with BCC at hand (root); NCCLUPROBE_PLAIN: without BCC's libraries
#   SIM=1             on the stand-ins, to try the script where there is no GPU
# A part that fails or takes too long does not stop the others.
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
parts=${*:-a b c d e}
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
export NCCLUPROBE=${NCCLUPROBE:-nccluprobe} SIM=${SIM:-0}
export NCCLUPROBE_PLAIN=${NCCLUPROBE_PLAIN:-$NCCLUPROBE}
export PYTHONPATH=$repo${PYTHONPATH:+:$PYTHONPATH}
sim=()
sizes=8,64K,1M,16M large=256M
[ "$SIM" = 1 ] && sim=(--sim) sizes=8,64K,1M large=4M
failed=()
exec > >(tee "$out/canary.txt") 2>&1

{
  uname -r
  python3 -c 'import sys; print("python", sys.version.split()[0])'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
} 2> /dev/null | tee "$out/versions.txt"
python3 "$repo/native/build.py" --out "$repo/build/native" > "$out/build.log" 2>&1 ||
  echo "native parts not built: see build.log"

part() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2 started=$SECONDS code=0
  shift 2
  printf '\n== %s\n' "$name"
  timeout -k 5 "$seconds" "$@" < /dev/null || code=$?
  [ "$code" = 124 ] && echo "took longer than $seconds s"
  [ "$code" = 0 ] || failed+=("$name: $code")
  echo "(exit code $code, $((SECONDS - started)) s)"
}
run() { # SECONDS NAME ARGUMENTS...
  local seconds=$1 name=$2
  shift 2
  # shellcheck disable=SC2086
  part "$name" "$seconds" $NCCLUPROBE_PLAIN canary "${sim[@]}" --nproc 2 \
    --hold $((seconds - 8)) "$@"
}

for one in $parts; do
  case $one in
    a)
      run 50 "a1. integers" --dtypes int8,uint8,int32,uint32,int64,uint64 --sizes 64K --iters 5
      run 50 "a2. floats" --dtypes float16,float32,float64,bfloat16 --sizes 64K --iters 5
      run 40 "a3. float8" --dtypes float8e4m3,float8e5m2 --sizes 64K --iters 5
      run 50 "a4. reductions" --ops all_reduce,reduce,reduce_scatter --redops all \
        --dtypes int32,float32,bfloat16 --sizes 64K --iters 5
      # With two ranks a sum of float32 is a send, a receive and an add; of int32 ncclAllReduce.
      run 60 "a5. times" --dtypes float32,int32 --sizes "$sizes" --iters 10
      run 60 "a6. bandwidth" --ops all_reduce,all_gather,reduce_scatter --dtypes float32,int32 \
        --sizes "$large" --iters 4
      ;;
    b) part "b. two-rank all_reduce" 60 python3 "$here/canary_cost.py" "$out" --pair ;;
    c) part "c. abort and reconnect" 100 python3 "$here/canary_reconnect.py" "$out" ;;
    d) part "d. faults" 400 python3 "$here/canary_faults.py" "$out" ;;
    e) part "e. cost" 150 python3 "$here/canary_cost.py" "$out" ;;
    *) echo "unknown part $one (a b c d e)" ;;
  esac
done
printf '\n== summary (%s s)\n' "$SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all parts as they must be"
