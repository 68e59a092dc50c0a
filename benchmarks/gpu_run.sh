#!/usr/bin/env bash
# Everything a GPU machine is needed for, in one go: build, the cuda tests, compute-sanitizer, the figures.
# The current Python, no virtual environment, no network. Results go to $OUT (default build/gpu).
# A step that fails does not stop the next; the exit status says whether all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
export OUT=${OUT:-build/gpu} SYSTEM_PYTHON=1 FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
export PYTHON=${PYTHON:-python3} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"
failed=()

step() { # step NAME COMMAND...: runs it, keeps its output in $OUT/NAME.log
  local name=$1 start=$SECONDS
  shift
  echo "== $name: $*"
  if "$@" 2>&1 | tee "$OUT/$name.log"; then
    echo "== $name: passed in $((SECONDS - start)) s"
  else
    failed+=("$name")
    echo "== $name: FAILED after $((SECONDS - start)) s"
  fi
}

sanitize() { # sanitize TOOL: the small cuda tests under compute-sanitizer
  if command -v compute-sanitizer >/dev/null; then
    step "sanitizer-$1" compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -q -m "cuda and not slow" -x tests
  else
    echo "== sanitizer-$1: skipped, compute-sanitizer is not on PATH"
  fi
}

step machine nvidia-smi
step build make build
step info "$PYTHON" -m fusedacc info
step tests "$PYTHON" -m pytest -q -m cuda tests
for tool in memcheck racecheck initcheck; do
  sanitize "$tool"
done
step figures "$PYTHON" benchmarks/gpu_figures.py --results "$OUT"
step memory "$PYTHON" benchmarks/peak_memory.py --device cuda --results "$OUT"
for dtype in float32 bfloat16 autocast; do
  step "demo-$dtype" "$PYTHON" examples/byte_transformer.py --dtype "$dtype" --out "$OUT"
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
echo "all steps passed; results in $OUT"
