"""Prints the table of the CUDA kernels, and what a step launches, for each architecture that is given, as JSON."""

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import json
import sys
from collections import Counter, defaultdict
from dataclasses import asdict

from benchmarks.gpu_model.cuda import CudaKernel, installed_kernels, is_pointer, known_kernels
from benchmarks.gpu_model.cuda_table import make_rows, shared_memory, steps

if __name__ == "__main__":
    rows, found, installed = [], [], installed_kernels()
    pointers, weights = defaultdict(set), defaultdict(set)  # places in the argument of a kernel
    for arch in map(int, sys.argv[1:]):
        recorded = steps(arch)
        rows += make_rows(known_kernels().values(), installed, arch, shared_memory(recorded.values()))
        for launch in (launch for step in recorded.values() for launch in step.launches):
            if isinstance(launch.specialization, CudaKernel):
                name = launch.specialization.name
                weights[name] |= set(launch.arguments["weights"])
                words = bytes.fromhex(launch.arguments["words"])
                pointers[name] |= {at for at in range(0, len(words) - 7, 8) if is_pointer(words[at : at + 8])}
        step = recorded["cuda"]
        kernels, early = Counter(launch.kernel for launch in step.launches), sum(x.early for x in step.launches)
        found.append({"kernels": kernels, "early": early, "pytorch": step.aten_launches})
    places = {name: [sorted(pointers[name]), sorted(weights[name])] for name in pointers}
    print(json.dumps({"rows": [asdict(row) for row in rows], "steps": found, "places": places}))
