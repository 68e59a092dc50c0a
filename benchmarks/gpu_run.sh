#!/usr/bin/env bash
# Everything that needs a GPU, in parts of at most ten minutes each. Needs no network.
#
#   benchmarks/gpu_run.sh PART
#
#   first   at most seven minutes: the build, the self-test, the GPU tests, and whole models from end to end
#   second  at most four minutes: kernels, experts, a large head, the host's time, memcheck, and DRAM counters
#   all     up to an hour and three quarters, for people with a GPU of their own: everything, with more sizes
#           and all tests
#
# Each part can be cut off: it begins with what matters most, and each row of results.csv is written as soon as it is
# measured. Every part builds first. If nothing has changed since the last build, that takes seconds.
#
# Each step has a time limit, and a step that fails does not stop the next. Exit status: 0 if every step
# passed or was skipped, 1 if one failed or ran out of time, 2 if there is no such part.
#
# FUSEDACC_LIBRARY  a libfusedacc.so from another machine (docs/gpu-status.md says how to build it). Without it,
#          nvcc compiles the library here. Only `all` has time for that
# OUT      where everything goes (default build/gpu), at most eight files: results.csv, summary.txt with a line
#          per step, and first.log, second.log or all.log with the output
# EFFORT   quick (records nothing), short or full (default short): how much the benchmarks measure
# PYTHON   the interpreter (default python3); it has torch
# DRY_RUN  1: print each step, with its limit in seconds, and do nothing
#
# In a copy that is no git checkout, FUSEDACC_COMMIT must say which commit the rows are of.
set -uo pipefail
OUT=${OUT:+$(realpath -m "$OUT")}
cd "$(dirname "$0")/.." || exit
OUT=${OUT:-build/gpu}

PARTS=(first second all)
part=${1:-}
if [ $# -ne 1 ] || [[ " ${PARTS[*]} " != *" $part "* ]]; then
  echo "no part '$*'; allowed: ${PARTS[*]}" >&2
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
if [ -z "${TORCH_CUDA_ARCH_LIST:-}${FUSEDACC_LIBRARY:-}" ] && [ "${DRY_RUN:-0}" != 1 ]; then
  TORCH_CUDA_ARCH_LIST=$("$PYTHON" -c '
import torch
found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
print(";".join(f"{major}.{minor}" for major, minor in sorted(found)))' 2>/dev/null)
fi
# Without a result, the build uses its defaults.
if [ -n "${TORCH_CUDA_ARCH_LIST:-}" ]; then export TORCH_CUDA_ARCH_LIST; else unset TORCH_CUDA_ARCH_LIST; fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Compilers work in parallel, and all steps share their results.
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$(nproc)}
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
export TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton FUSEDACC_CACHE=$scratch/fusedacc

step() { # step NAME SECONDS COMMAND...
  local name=$1 limit=$2 log="$OUT/$part.log"
  shift 2
  if [ "$DRY_RUN" = 1 ]; then
    printf '%s\t%s\t%s s\t%s\n' "$part" "$name" "$limit" "${*//$'\n'/; }"
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
  printf '%s  %-14s  %-12s  %3d s of %d\n' "$part" "$name" "$result" $took "$limit" |
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

gpu_tests() { # gpu_tests SECONDS [OPTION...]: as many at a time as there are cores, where pytest-xdist is there
  local limit=$1 jobs
  shift
  jobs=$(nproc)
  local paths=(tests/cuda/test_one_rank_cuda.py tests/cuda tests/optimizer/test_torch_optimizers.py
    tests/planner/test_find.py tests/benchmarks)
  local parallel=()
  "$PYTHON" -c 'import xdist' 2>/dev/null && parallel=(-n $((jobs < 12 ? jobs : 12)) --dist worksteal)
  # A line for each test as it ends, so that a run that is cut off shows what failed.
  step tests "$limit" env "$@" OMP_NUM_THREADS=1 "$PYTHON" -m pytest -v -rsfE --durations=10 -p no:cacheprovider \
    ${parallel[@]+"${parallel[@]}"} -m cuda "${paths[@]}"
}

backends() { # backends SECONDS. Tests of a backend that cannot run are skipped, so this fails where one cannot.
  step backends "$1" "$PYTHON" -c '
import sys, torch
from fusedacc.kernels import registry
at = torch.device("cuda"), torch.float32, torch.float32
found = {name: registry.obstacle(name, *at) or "runs" for name in ("cuda", "triton")}
print(found)
sys.exit(set(found.values()) != {"runs"})'
}

sanitize() { # sanitize TOOL SECONDS [OPTION...]
  local tool=$1 limit=$2
  shift 2
  if ! command -v compute-sanitizer >/dev/null; then
    step "$tool" "$limit" bash -c "echo compute-sanitizer is not on PATH; exit $SKIPPED"
    return
  fi
  # Every tensor is a separate allocation, so that an access beyond it is an access beyond an allocation.
  # torch handles errors of CUDA's calls. A kernel launch of ours that fails, fails its test.
  step "$tool" "$limit" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$tool" --target-processes application-only --report-api-errors no \
    --print-limit 20 --error-exitcode 9 \
    "$PYTHON" -m pytest -q -p no:cacheprovider "$@" tests/cuda/test_sanitized.py
}

figures() { # figures NAME SECONDS [OPTION...]
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" -m "benchmarks.suites.$name" --device cuda ${effort[@]+"${effort[@]}"} "$@" \
    --results "$OUT/results.csv"
}

part_first() {
  step machine 5 nvidia-smi
  build 70
  backends 10
  step selftest 40 "$PYTHON" -m fusedacc selftest --no-benchmark --output "$scratch/selftest.json"
  gpu_tests 100
  figures end_to_end 195 --seconds 165
}

part_second() {
  local sizes=1Gi,64Mi,1Mi,1Ki,256Mi,16Mi,64Ki head="head 128256 x 4096" elements=$((1 << 28))
  [ "$EFFORT" = quick ] && sizes=1Ki head="head 1000 x 32" elements=$((1 << 12))
  build 40
  figures kernels 60 --sizes "$sizes" --dtypes bfloat16:float32,float32:float32 \
    --providers "fusedacc cuda,fusedacc triton,add_,torch._foreach_add_,foreach cast and add"
  figures experts 30
  figures head 30 --only "$head"
  figures host_time 20
  sanitize memcheck 35 -k "not triton"
  figures dram_check 25 --elements "$elements" --cases "fusedacc cuda bf16"
}

part_all() {
  step machine 20 nvidia-smi
  build 600
  step info 60 "$PYTHON" -m fusedacc info
  step selftest 120 "$PYTHON" -m fusedacc selftest --output "$scratch/selftest.json"
  backends 20
  gpu_tests 900 FUSEDACC_FULL_TESTS=1
  figures end_to_end 900
  figures kernels 300
  figures dram_check 300
  sanitize memcheck 300
  sanitize racecheck 300
  sanitize initcheck 300
  # The short sweep, and two models that only a GPU has room for.
  local models=(--models resnet50,gpt2,gpt2_xl,llama3_8b)
  [ "$EFFORT" = short ] || models=()
  figures models 200 ${models[@]+"${models[@]}"}
  local suite
  for suite in experts head host_time update training wrapper_window peak_memory linear embedding layers planner_limit; do
    figures "$suite" 180
  done
  step demo 100 "$PYTHON" examples/where_it_pays.py --device cuda --out "$scratch/demo"
}

"part_$part"
[ "$DRY_RUN" = 1 ] && exit
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}; see $OUT"
  exit 1
fi
echo "all steps passed or were skipped; see $OUT"
