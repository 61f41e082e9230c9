"""Compiles for sm_90, without a GPU, the Triton kernels that steps of networks need; prints their numbers as JSON.

Triton's own just-in-time path runs with a driver that launches nothing, and derives types, alignment and divisibility
of the arguments as it does on a GPU. Needs TRITON_INTERPRET=0, with which Triton's kernels can be compiled.
"""

import json
import os
import re
import resource
import statistics
import subprocess
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"  # nasfast's operators then take CPU tensors

import torch  # noqa: E402
import torchvision  # noqa: E402

import nasfast.ops.triton  # noqa: E402
from nasfast.ops import bn_act, use_backend  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# in place of a driver, and of a compiled kernel
_driver = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_active_torch_device=lambda: torch.device("cpu"),
    utils=SimpleNamespace(get_device_properties=lambda d: {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}),
)
_nothing = SimpleNamespace(function=None, packed_metadata=None, launch_metadata=lambda *a: None, run=lambda *a: None)
_compile = JITFunction._do_compile
# what was compiled, by name and key, and the keys of the present network
compiled: dict[tuple[str, str], dict[str, float]] = {}
present: list[tuple[str, str]] = []


def _seconds() -> float:
    times = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(time.ru_utime + time.ru_stime for time in times)


def compile_once(kernel: JITFunction, key: str, signature: dict, device: int, *rest: object) -> SimpleNamespace:
    """Compile the kernel if no network has, and launch nothing."""
    name = kernel.fn.__name__, str(key)
    present.append(name)
    if name not in compiled:
        start = _seconds()
        made = _compile(kernel, key, signature, device, *rest)
        seconds = _seconds() - start
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr).groups())
        wide = made.asm["ptx"].count(".v4.b32")
        compiled[name] = {"seconds": seconds, "registers": registers, "stack": stack, "wide": wide}
    kernel.device_caches[device][0][key] = _nothing
    return _nothing


def shapes(name: str) -> list[tuple[int, int, int]]:
    """(C, H, W) of the inputs of the BatchNorms of a network of torchvision, for images of 32 pixels."""
    found = {}
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.register_forward_pre_hook(lambda _, given: found.setdefault(tuple(given[0].shape[1:])))
        model(torch.empty(2, 3, 32, 32))
    return list(found)


@triton.jit
def double(x, y, size, TILE: tl.constexpr):
    """What a kernel of three lines takes says how fast this machine compiles, whoever else uses it."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(y + places, 2 * tl.load(x + places, places < size), places < size)


def unit() -> float:
    """Seconds to compile `double`, once all is loaded."""
    present.clear()
    for tile in (64, 128, 256, 512, 1024):
        double[(1,)](torch.zeros(9), torch.zeros(9), 9, TILE=tile)
    return statistics.median(compiled.pop(name)["seconds"] for name in present)


def needed(name: str, acts: tuple[str, ...], dtype: torch.dtype) -> list[str]:
    """The kernels for steps of two batches, and for evaluation."""
    present.clear()
    for kernel in vars(nasfast.ops.triton).values():
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()
    for channels, height, width in shapes(name):
        weight, bias = torch.ones(channels, requires_grad=True), torch.zeros(channels)
        running = {"running_mean": torch.zeros(channels), "running_var": torch.ones(channels)}
        for batch, act in product((2, 3), acts):
            x = torch.zeros(batch, channels, height, width, dtype=dtype).contiguous(memory_format=torch.channels_last)
            bn_act(
                x.requires_grad_(), weight, bias, act=act, residual=x if act == "identity" else None
            ).sum().backward()
            with torch.no_grad():
                bn_act(x, weight, bias, act=act, training=False, **running)
    return [" ".join(name) for name in present]


NETWORKS = {
    "mobilenet_v2": ("relu6", "identity"),
    "mobilenet_v3_large": ("relu", "hswish", "identity"),
    "efficientnet_b0": ("silu", "identity"),
    "resnet50": ("relu", "identity"),
    "shufflenet_v2_x1_0": ("relu", "identity"),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


if __name__ == "__main__":
    driver.set_active(_driver)
    with tempfile.TemporaryDirectory() as cache, patch.object(JITFunction, "_do_compile", compile_once):
        triton.knobs.cache.dir = cache
        seconds = unit()
        with use_backend("triton"):
            found = {
                f"{name}, {kind}": needed(name, acts, dtype)
                for (name, acts), (kind, dtype) in product(NETWORKS.items(), TYPES.items())
            }
    kernels = {" ".join(name): sizes for name, sizes in compiled.items()}
    print(json.dumps({"unit": seconds, "networks": found, "kernels": kernels}))
