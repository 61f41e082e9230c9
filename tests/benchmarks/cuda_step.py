"""Prints the launches of a step on the CUDA kernels, as JSON: by kernel, and how many may start early."""

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import json
from collections import Counter

from benchmarks.gpu_model.recorder import Workload, record_step

if __name__ == "__main__":
    step = record_step(Workload(backend="cuda"), arch=86)
    kernels, early = Counter(launch.kernel for launch in step.launches), sum(launch.early for launch in step.launches)
    print(json.dumps({"kernels": kernels, "early": early, "pytorch": step.aten_launches}))
