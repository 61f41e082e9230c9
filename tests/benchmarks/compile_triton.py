"""Compiles every Triton kernel once for sm_90, without a GPU; prints registers, stack and shared memory as JSON.

Triton's own just-in-time path runs with a driver that launches nothing, and derives types, alignment and divisibility
of the arguments as it does on a GPU. Needs TRITON_INTERPRET=0, with which Triton's kernels can be compiled.
"""

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"  # nasfast's operators then take CPU tensors

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from nasfast.engine import EagerEngine  # noqa: E402
from nasfast.ops import bn_act, mixed_bn, use_backend  # noqa: E402
from nasfast.spaces import get_space, mean_path  # noqa: E402
from nasfast.supernet import Supernet  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
found: dict[str, dict[str, int]] = {}
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


def compile_first(kernel: JITFunction, key: str, signature: dict, device: int, *rest: object) -> SimpleNamespace:
    """Compile the kernel if no call has, and launch nothing."""
    if kernel.fn.__name__ not in found:
        made = _compile(kernel, key, signature, device, *rest)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", said.stdout + said.stderr).groups())
        sizes = {"warps": made.metadata.num_warps, "shared": made.metadata.shared}
        found[kernel.fn.__name__] = {"registers": registers, "stack": stack, **sizes}
    kernel.device_caches[device][0][key] = _nothing
    return _nothing


def inputs(count: int, dtype: torch.dtype) -> list[Tensor]:
    x = torch.zeros(4, 24, 14, 14, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return [x.clone().requires_grad_() for _ in range(count)]


def step(name: str, dtype: torch.dtype) -> None:
    """Forward and backward of a space."""
    space = get_space(name)
    net = Supernet(space, init="gaussian", layer_indicators=False)
    net.freeze("bn")
    net.to(memory_format=torch.channels_last).train()
    images = torch.zeros(2, space.in_channels, 64, 64).contiguous(memory_format=torch.channels_last)
    engine = EagerEngine(net, bf16=dtype == torch.bfloat16)
    engine.forward_backward(images, torch.zeros(2, dtype=torch.long), [mean_path(space)])


def calls(dtype: torch.dtype) -> None:
    """Calls of the operators that these steps do not use."""
    (x,), weight = inputs(1, dtype), torch.ones(24, requires_grad=True)
    bn_act(x, weight, torch.zeros(24)).sum().backward()
    running = {"running_mean": torch.zeros(24), "running_var": torch.ones(24)}
    bn_act(x, weight, torch.zeros(24), **running, training=False)
    # more tensors than one launch takes, one of them not normalised
    gates = torch.ones(10, requires_grad=True)
    mixed_bn(inputs(10, dtype), gates, normalize=[True] * 9 + [False]).sum().backward()


if __name__ == "__main__":
    driver.set_active(_driver)
    with patch.object(JITFunction, "_do_compile", compile_first), use_backend("triton"):
        for dtype in (torch.bfloat16, torch.float32):
            step("mobilenet_v2", dtype)
            step("shufflenet_v2", dtype)
            calls(dtype)
    print(json.dumps(found))
