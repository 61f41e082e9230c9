#!/usr/bin/env bash
# Build with CUDA, run the GPU tests, measure, and write one JSON file, after every part. Needs a CUDA GPU, and in the Python
# named by PYTHON (default python3) torch >= 2.11 with CUDA, Triton, the dependencies of pyproject.toml, pybind11, cmake,
# ninja, pytest and hypothesis; no network. A relative FILE is relative to the repository.
#
#     bash benchmarks/gpu.sh [--out FILE] [--minutes N] [--skip-tests]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
out=benchmarks/results/gpu.json
minutes=8
tests=1
while (($#)); do
  case $1 in
    --out) out=$2; shift 2 ;;
    --minutes) minutes=$2; shift 2 ;;
    --skip-tests) tests=0; shift ;;
    *) echo "gpu.sh: unknown option $1; known are --out FILE, --minutes N, --skip-tests" >&2; exit 2 ;;
  esac
done

"$python" -c '
import sys, torch
if not torch.cuda.is_available():
    sys.exit("gpu.sh: torch sees no CUDA device")
print(torch.cuda.get_device_name(), "torch", torch.__version__)'
# in place and without pip, which would ask an index for what is not there
NASFAST_NATIVE=ON NASFAST_CUDA=AUTO "$python" setup.py build_ext --inplace
ln -sfn ../kernels/triton nasfast/_triton
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$python" -c 'from nasfast.doctor import doctor; print(doctor())'
if ((tests)); then
  "$python" -m pytest -q tests/ops/test_triton.py tests/ops/test_orthogonalize.py tests/engine tests/train/test_loop.py tests/test_profile.py tests/data/test_dali.py || echo "gpu.sh: tests FAILED"
fi
"$python" benchmarks/bench_gpu.py --minutes "$minutes" --out "$out"
"$python" benchmarks/bench_orthogonalize.py --quick --out "${out%.json}_orthogonalize.json"
"$python" benchmarks/bench_loader.py --only runs --device cuda --rounds 3 --steps 40 --out "${out%.json}_loader.json"
