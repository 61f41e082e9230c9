"""The CUDA kernels that read whole rows, followed by the model; run as a program by its test.

Prints, as JSON by stage: the bytes that the machine code accesses 16 at a time, the bytes of the tensors, and the
number of threads.
"""

import benchmarks.gpu_model.compilable  # noqa: F401

# isort: split
import json
import tempfile

import torch

from benchmarks.gpu_model.model import costs
from benchmarks.gpu_model.recorder import Step, recorded
from nasfast.ops import conv_bn_act

ARCH = 86
# blocks of 256 threads on 68 multiprocessors have 32 rows of 64 channels at once, and these divide the rows evenly
IMAGES, HEIGHT, WIDTH, CHANNELS = 12, 64, 68, 64


def main() -> None:
    shape = (IMAGES, CHANNELS, HEIGHT, WIDTH)
    step = Step()
    with recorded(step, ARCH, backend="cuda"):
        x = torch.zeros(shape, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
        weight, bias = torch.ones(CHANNELS, requires_grad=True), torch.zeros(CHANNELS, requires_grad=True)
        y = conv_bn_act(x, torch.zeros(CHANNELS, CHANNELS, 1, 1, dtype=x.dtype), weight, bias, residual=x)
        y.backward(torch.zeros_like(y))
    step.launches = [launch for launch in step.launches if launch.kernel in ("apply", "reduce")]
    with tempfile.TemporaryDirectory() as cache:
        found = costs(step, ARCH, processes=1, cache=cache)
    said = {}
    for launch, cost in zip(step.launches, found, strict=True):
        accessed = 32 * 16 * cost.accesses[16]
        threads = launch.programs * launch.specialization.threads
        said[launch.kernel] = {"accessed": accessed, "bytes": launch.bytes, "threads": threads}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
