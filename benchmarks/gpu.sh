#!/usr/bin/env bash
# The ten-minute plan for a machine with a CUDA GPU: tests, measures and builds, in parts; `--list` lists them. Needs, in the
# Python named by PYTHON (default python3), torch >= 2.11 with CUDA, Triton, NumPy, PyYAML and pytest; no network.
#
#     bash benchmarks/gpu.sh [--out DIR] [--part NAME]... [--list] [--device cuda|cpu]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu.plan "$@"
