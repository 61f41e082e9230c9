"""Prints the table of the CUDA kernels, and what a step launches, for each architecture that is given, as JSON."""

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import json
import sys
from collections import Counter
from dataclasses import asdict

from benchmarks.gpu_model.cuda import installed_kernels, known_kernels
from benchmarks.gpu_model.cuda_table import make_rows, shared_memory, steps

if __name__ == "__main__":
    rows, found, installed = [], [], installed_kernels()
    for arch in map(int, sys.argv[1:]):
        recorded = steps(arch)
        rows += make_rows(known_kernels().values(), installed, arch, shared_memory(recorded.values()))
        step = recorded["cuda"]
        kernels, early = Counter(launch.kernel for launch in step.launches), sum(x.early for x in step.launches)
        found.append({"kernels": kernels, "early": early, "pytorch": step.aten_launches})
    print(json.dumps({"rows": [asdict(row) for row in rows], "steps": found}))
