"""Prints how often each kernel is launched in a step of the graph engine on the CUDA kernels, as JSON."""

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import json
from collections import Counter

from benchmarks.gpu_model.recorder import Workload, record_step

if __name__ == "__main__":
    step = record_step(Workload(backend="cuda"), arch=86)
    print(json.dumps(Counter(launch.kernel for launch in step.launches) | {"pytorch": step.aten_launches}))
