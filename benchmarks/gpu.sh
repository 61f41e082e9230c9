#!/usr/bin/env bash
# The plan for a machine with a CUDA GPU: ten minutes, the most valuable facts first, and a report of its results;
# `--list` lists its parts. It takes the extension that is in nasfast/, made here or on another machine with this torch or
# an older one; only where there is none that runs here it needs nvcc, a C++ compiler, CMake and Ninja.
# Besides, the Python named by PYTHON (default python3) needs torch >= 2.11 with CUDA, NumPy and PyYAML; what else a part
# needs (torchvision, pytest, ncu, compute-sanitizer) is missed by this part alone. No network.
#
#     bash benchmarks/gpu.sh [--out DIR] [--part NAME]... [--seconds N] [--device cuda|cpu]
#     bash benchmarks/gpu.sh --report [--out DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu.plan "$@"
