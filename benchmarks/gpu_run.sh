#!/usr/bin/env bash
# Everything that needs a GPU, in parts of at most ten minutes each. Needs no network.
#
#   benchmarks/gpu_run.sh [PART]
#
#   first  what a first run on a new machine is to settle: the self-test, the cuda tests, L2 and DRAM
#          counters, kernels and two models, memcheck, from how many bytes on a gradient is best added at once
#   1  build, what runs here, the cuda tests, the demo
#   2  a few small tests under compute-sanitizer: memcheck, racecheck, initcheck
#   3  the kernels' and the update's figures, and the byte counter against the DRAM counters where ncu can read them
#   4  the figures of whole models, training, the wrapper's window and peak memory
#   5  the figures of Linear and Embedding: products and rows alone, and through the wrapper
#
# Without PART: 1 to 5 in turn. Every part builds first, which takes seconds once it is built. Where a machine is
# to be had for half an hour: first, then 3, then the others by what is still to be known.
#
# Each step has a time limit, and a step that fails does not stop the next. Exit status: 0 if every step
# passed or was skipped, 1 if one failed or ran out of time, 2 if there is no such part.
#
# OUT      where everything goes (default build/gpu), at most eight files: results.csv, which gets each row as
#          soon as it is measured, summary.txt with a line per step, partfirst.log and part1.log to part5.log
# EFFORT   quick (records nothing), short or full (default short): how much the figures take in
# PYTHON   the interpreter (default python3); it has torch
# DRY_RUN  1: print each step, with its limit in seconds, and do nothing
#
# In a copy that is no git checkout, FUSEDACC_COMMIT must say which commit the rows are of.
set -uo pipefail
OUT=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")/.." || exit
OUT=${OUT:-build/gpu}

PARTS=(first 1 2 3 4 5)
part=${1:-all}
if [ $# -gt 1 ] || [[ " all ${PARTS[*]} " != *" $part "* ]]; then
  echo "no part '$*'; allowed: ${PARTS[*]}, or none for 1 to 5" >&2
  exit 2
fi
case ${EFFORT:=short} in
  short) effort=() ;;
  quick | full) effort=(--"$EFFORT") ;;
  *)
    echo "EFFORT=$EFFORT; allowed: quick, short, full" >&2
    exit 2
    ;;
esac

if [ ! -e .git ] && [ -z "${FUSEDACC_COMMIT:-}" ]; then
  echo "this is no git checkout: say which commit it is of in FUSEDACC_COMMIT" >&2
  exit 2
fi

# nvcc, compute-sanitizer and ncu may be installed and not on PATH.
for folder in "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer} /opt/nvidia/nsight-compute/*; do
  [ -d "$folder" ] && PATH=$PATH:$folder
done
export FORCE_CUDA=1 PYTHON=${PYTHON:-python3}
# For the GPUs that are there: nvcc takes minutes for each architecture.
if [ -z "${TORCH_CUDA_ARCH_LIST:-}" ] && [ "${DRY_RUN:-0}" != 1 ]; then
  TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c '
import torch
found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
print(";".join(f"{major}.{minor}" for major, minor in sorted(found)))' 2>/dev/null)
fi
# Without a result, the build uses its defaults.
if [ -n "${TORCH_CUDA_ARCH_LIST:-}" ]; then export TORCH_CUDA_ARCH_LIST; else unset TORCH_CUDA_ARCH_LIST; fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export MAX_JOBS=${MAX_JOBS:-$(nproc)} TQDM_MININTERVAL=${TQDM_MININTERVAL:-15}
DRY_RUN=${DRY_RUN:-0}
SKIPPED=77 # the exit status of a step that cannot run here
KEPT=400000 # bytes of one step's output that stay in its part's log
failed=()
scratch=SCRATCH
if [ "$DRY_RUN" != 1 ]; then
  mkdir -p "$OUT" && scratch=$(mktemp -d) || exit
  trap 'rm -rf "$scratch"' EXIT
fi

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2 log="$OUT/part$part.log"
  shift 2
  if [ "$DRY_RUN" = 1 ]; then
    printf 'part %s\t%s\t%s s\t%s\n' "$part" "$name" "$limit" "${*//$'\n'/; }"
    return
  fi
  local begin=$SECONDS before status result took
  printf '== %s: %s\n' "$name" "${*//$'\n'/; }" | tee -a "$log"
  before=$(wc -c <"$log")
  timeout --signal=INT --kill-after=5 "$limit" "$@" </dev/null 2>&1 | tee -a "$log"
  status=${PIPESTATUS[0]} took=$((SECONDS - begin))
  shorten "$log" "$before"
  if [ "$status" -eq 0 ]; then
    result=passed
  elif [ "$status" -eq $SKIPPED ]; then
    result=skipped
  else
    failed+=("$name")
    result="FAILED ($status)"
    # 137: it was killed, by the limit or for want of memory.
    if [ "$status" -eq 124 ] || { [ "$status" -eq 137 ] && [ $took -ge "$limit" ]; }; then
      result="TIMED OUT"
    fi
  fi
  printf 'part %s  %-14s  %-12s  %3d s of %d\n' "$part" "$name" "$result" $took "$limit" |
    tee -a "$OUT/summary.txt"
}

shorten() { # shorten LOG BYTES: cuts the middle out of what follows the first BYTES, if it is long
  local size
  size=$(wc -c <"$1")
  [ $((size - $2)) -le $KEPT ] && return
  {
    head -c $(($2 + KEPT / 4)) "$1"
    printf '\n[... %d bytes left out ...]\n' $((size - $2 - KEPT))
    tail -c $((KEPT * 3 / 4)) "$1"
  } >"$scratch/log" && cat "$scratch/log" >"$1"
}

build() { # build SECONDS
  step build "$1" "$PYTHON" setup.py build_ext --inplace
}

gpu_tests() { # gpu_tests SECONDS: eight at a time where pytest-xdist is there
  local paths=(tests/cuda tests/optimizer/test_torch_optimizers.py tests/planner/test_find_processes.py tests/benchmarks)
  local parallel=()
  "$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n 8)
  step tests "$1" env FUSEDACC_FULL_TESTS=1 "$PYTHON" -m pytest -q -rs --durations=10 -p no:cacheprovider ${parallel[@]+"${parallel[@]}"} \
    -m cuda "${paths[@]}"
}

backends() { # Tests of a backend that cannot run are skipped, so this fails where one cannot.
  step backends 20 "$PYTHON" -c '
import sys, torch
from fusedacc.kernels import registry
at = torch.device("cuda"), torch.float32, torch.float32
found = {name: registry.obstacle(name, *at) or "runs" for name in ("cuda", "triton")}
print(found)
sys.exit(set(found.values()) != {"runs"})'
}

sanitize() { # sanitize TOOL SECONDS
  if ! command -v compute-sanitizer >/dev/null; then
    step "$1" "$2" bash -c "echo compute-sanitizer is not on PATH; exit $SKIPPED"
    return
  fi
  # Every tensor is a separate allocation, so that an access beyond it is an access beyond an allocation.
  # torch handles errors of CUDA's calls. A kernel launch of ours that fails, fails its test.
  step "$1" "$2" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --target-processes application-only --report-api-errors no \
    --print-limit 20 --error-exitcode 9 \
    "$PYTHON" -m pytest -q -p no:cacheprovider tests/cuda/test_sanitized.py
}

figures() { # figures NAME SECONDS [OPTION...]
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" -m "benchmarks.suites.$name" --device cuda ${effort[@]+"${effort[@]}"} "$@" \
    --results "$OUT/results.csv"
}

part_first() {
  step machine 10 nvidia-smi
  build 75
  step info 30 "$PYTHON" -m fusedacc info --verbose
  step selftest 45 "$PYTHON" -m fusedacc selftest --output "$scratch/selftest.json"
  backends
  gpu_tests 120
  figures dram_check 60 --elements $((1 << 28)) --cases "fusedacc cuda bf16,torch mixed add_"
  figures kernels 70 --sizes 1Ki,1Mi,64Mi,1Gi --dtypes bfloat16:float32,float32:float32 \
    --providers "fusedacc cuda,fusedacc triton,add_,torch._foreach_add_,foreach cast and add"
  figures models 50 --models resnet50,gpt2 --settings bfloat16
  sanitize memcheck 50
  figures wrapper_window 35 --limits 1,16,32
}

part_1() {
  step machine 20 nvidia-smi
  build 90
  step info 60 "$PYTHON" -m fusedacc info --verbose
  backends
  gpu_tests 230
  step python_hooks 50 env FUSEDACC_NATIVE_HOOKS=0 "$PYTHON" -m pytest -q -p no:cacheprovider tests/cuda/test_model_cuda.py
  step demo 100 "$PYTHON" examples/where_it_pays.py --device cuda --out "$scratch/demo"
}

part_2() {
  build 90
  backends
  sanitize memcheck 150
  sanitize racecheck 150
  sanitize initcheck 150
}

part_3() {
  build 60
  figures kernels 300
  figures dram_check 110 --cases "fusedacc cuda bf16,fusedacc cuda f32,fusedacc triton bf16,torch mixed add_"
  figures update 100
}

part_4() {
  # The short sweep, and two models that only a GPU has room for.
  local models=(--models resnet50,gpt2,gpt2_xl,llama3_8b)
  [ "$EFFORT" = short ] || models=()
  build 60
  figures models 200 ${models[@]+"${models[@]}"}
  figures training 130
  figures wrapper_window 90
  figures peak_memory 90
}

part_5() {
  build 60
  figures linear 180
  figures embedding 120
  figures layers 180
}

if [ "$part" = all ]; then
  chosen=("${PARTS[@]:1}")
else
  chosen=("$part")
fi
for part in "${chosen[@]}"; do
  "part_$part"
done
[ "$DRY_RUN" = 1 ] && exit
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}; see $OUT"
  exit 1
fi
echo "all steps passed or were skipped; see $OUT"
