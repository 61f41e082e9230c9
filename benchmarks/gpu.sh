#!/usr/bin/env bash
# The plan for a machine with a CUDA GPU: three commands of at most five minutes each, and a report of their results;
# `--list` lists their parts. Needs nvcc, a C++ compiler, CMake and Ninja, and in the Python named by PYTHON (default
# python3) torch >= 2.11 with CUDA, pybind11, Triton, NumPy, PyYAML and pytest; no network, and no installation of nasfast.
#
#     bash benchmarks/gpu.sh measure|check|tests [--out DIR] [--part NAME]... [--device cuda|cpu]
#     bash benchmarks/gpu.sh --report [--out DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu.plan "$@"
