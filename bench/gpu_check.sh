#!/usr/bin/env bash
# On a machine with a GPU, in under 10 minutes: build for its architecture, run every operation on the device against the
# CPU, measure, write bench/results/<gpu>.json.
#
#     bash bench/gpu_check.sh
#     bash bench/gpu_check.sh --dry-run DIR    # no GPU needed: the same steps on the CPU and its emulator, result in DIR
#
# Needs a torch with CUDA or ROCm, nvcc or hipcc, g++ and the packages of the extra "test"; nothing is downloaded if
# setuptools and pybind11 are installed. Installs into a temporary folder, so the environment stays as it is.
#
# No GPU has run this yet: there is no measured GPU figure in this repository, every one is a prediction.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
started=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset SPECDEC_BACKEND SPECDEC_CPU_ISA

step() { # step SECONDS NAME COMMAND...: within that time
  local limit=$1 name=$2 begin=$SECONDS
  shift 2
  printf '\n==== %s\n' "$name"
  timeout --foreground "$limit" "$@" || { echo "$name: failed or longer than $limit s"; return 1; }
  echo "($((SECONDS - begin)) s)"
}

if [ "${1:-}" = --dry-run ]; then
  out=${2:?"--dry-run needs a folder for the result"} device=cpu kind=cpu
  mkdir -p "$out"
  out=$(cd "$out" && pwd)
  export SPECDEC_WITH_CUDA=0 SPECDEC_WITH_HIP=0
else
  [ $# -eq 0 ] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2; }
  out=$root/bench/results device=cuda
  # kind and architecture of the first device, as the build's variables want them
  read -r kind arch < <("$python" - <<'PY'
import torch

if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} sees no GPU")
if torch.version.hip:
    print("hip", torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0])
else:
    print("cuda", "".join(map(str, torch.cuda.get_device_capability(0))))
PY
  ) || exit 1
  if [ "$kind" = hip ]; then
    export SPECDEC_WITH_HIP=1 SPECDEC_WITH_CUDA=0 SPECDEC_HIP_ARCHS=$arch
  else
    export SPECDEC_WITH_CUDA=1 SPECDEC_CUDA_ARCHS=$arch
  fi
  echo "$kind device of architecture $arch"
fi

build() {
  local isolation=()
  local there='import pybind11, setuptools; exit(int(setuptools.__version__.split(".")[0]) < 77)'
  if "$python" -c "$there" 2>/dev/null; then isolation=(--no-build-isolation); fi
  "$python" -m pip install --quiet --no-deps "${isolation[@]}" --target "$work/site" "$root"
}

backend() { # what is used, and that the module for this device is among it
  "$python" -m specdec_kernels
  "$python" -c 'import sys, specdec_kernels as sk; sys.exit(sk.backends()[sys.argv[1]]["reason"])' "$kind"
}
export -f build backend
export python work root kind

step 180 "build" bash -euo pipefail -c build
cd "$work" # in the source folder Python would import specdec_kernels from there
export PYTHONPATH=$work/site
step 30 "what is used" bash -euo pipefail -c backend
failed=0
tests() { # tests NAME SECONDS CALLS EXPRESSION: the device tests that the expression names
  SPECDEC_DEVICE_CALLS=$3 step "$2" "every operation on the device: $1" "$python" -m pytest -c "$root/pyproject.toml" \
    --rootdir "$root" -p no:cacheprovider -rs --junitxml "$work/tests/$1.xml" -k "$4" "$root"/tests/test_device{,_attention,_stream}.py
}
mkdir "$work/tests"
if [ "$device" = cpu ]; then
  tests emulator 150 300 "emulator" || failed=1
else
  tests "$kind" 100 300 "not triton and not emulator" || failed=1
  if "$python" -c 'import sys, specdec_kernels as sk; sys.exit(sk.backends()["triton"]["reason"])'; then
    tests triton 150 50 "triton" || failed=1 # fewer calls: each new kind is compiled when it is made
  fi
fi
step 130 "benchmarks" "$python" "$root/bench/bench_gpu.py" --device "$device" --out "$out" --seconds 90 \
  --tests "$work/tests" || failed=1
echo
echo "$((SECONDS - started)) s in all"
exit $failed
