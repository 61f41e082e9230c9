"""Operators in a new process: without the extension, as Python ends, and for tensors of a GPU that is not there.

PyTorch is imported once: each program runs in a fork of a process that has imported nothing else.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.slow

OUTLIVED = """
import os, resource, sys, torch
from nasfast.ops import _native, conv_bn_act
torch.set_num_threads(1)
child = os.fork()
if child:
    # if no address space can be reserved, all memory comes from malloc
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), now + (3 << 30)))
torch.keep = conv_bn_act(torch.ones(4, 16, 64, 64), torch.ones(16, 16, 1, 1), torch.ones(16), torch.zeros(16))
used = _native.extension.pool_bytes()[0]
assert (used == 0) == bool(child), used
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

WITHOUT_EXTENSION = """
def missing(path):
    raise OSError(f"{path}: no such file")
torch.ops.load_library = missing
from nasfast import ops
from nasfast.measure.doctor import doctor
x = torch.randn(2, 3, 4, 4)
assert ops.resolve_backend("bn_act", x).name == "reference"
ops.bn_act(x, torch.ones(3), torch.zeros(3))
try:
    ops.bn_act(x, torch.ones(3), torch.zeros(3), backend="cpu")
except RuntimeError as error:
    print(error)
print(doctor())
"""

EVERY_OPERATOR = """
import sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
import nasfast.engine, nasfast.supernet
# as torch.compiler does, whose decorators import it
assert "triton" not in sys.modules
from nasfast.ops import ConvBNParams, Stage, bn_act, conv_bn_act_chain, mixed_bn

def nhwc(*shape, dtype=torch.float32):
    return torch.ones(shape, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)

with FakeTensorMode(allow_non_fake_inputs=True):
    for dtype in (torch.float32, torch.bfloat16):
        affine = torch.ones(16, device="cuda", requires_grad=True)
        x, kernels = nhwc(2, 16, 6, 6, dtype=dtype), ((16, 16, 1, 1), (16, 1, 3, 3), (16, 16, 3, 3))
        params = [ConvBNParams(nhwc(*shape, dtype=dtype), affine, affine) for shape in kernels]
        stages = [Stage(p, 1, p.conv_weight.shape[2] // 2, 16 // p.conv_weight.shape[1], "silu") for p in params]
        conv_bn_act_chain(x, stages, residual=x)
        bn_act(x, affine, affine)
        mixed_bn([x, x], affine[:2], normalize=[True, False])
# fake tensors import Triton themselves
print(*[name for name in ("nasfast.ops.triton",) if name in sys.modules])
"""

PROGRAMS = {"outlived": OUTLIVED, "without extension": WITHOUT_EXTENSION, "every operator": EVERY_OPERATOR}
DRIVER = """
import os, sys, torch
for name, code in zip(sys.argv[2::2], sys.argv[3::2]):
    if os.fork() == 0:
        file = os.open(f"{sys.argv[1]}/{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1), os.dup2(file, 2)
        exec(code)
        break  # and ends as Python does
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, str]:
    """What each program printed; none failed."""
    out = tmp_path_factory.mktemp("programs")
    words = [word for program in PROGRAMS.items() for word in program]
    done = subprocess.run([sys.executable, "-c", DRIVER, str(out), *words], capture_output=True, text=True, check=True)
    printed = {name: (out / name).read_text() for name in PROGRAMS}
    assert done.stdout.split() == ["0"] * len(PROGRAMS), printed
    return printed


def test_tensors_outlive_the_interpreter_with_a_pool_and_with_little_address_space(native, printed):
    if "-fsanitize" in native.build_info().flags:
        pytest.skip("the sanitizer's build has no pool")
    assert printed["outlived"] == ""


def test_it_works_without_the_extension_and_says_what_to_do(printed):
    assert "backend 'cpu' (from backend) cannot serve" in printed["without extension"]
    assert "bn_act on cpu: reference" in printed["without extension"] and "pip install" in printed["without extension"]


def test_triton_is_not_imported_and_who_lacks_kernels_learns_it_once(printed):
    lines = printed["every operator"].splitlines()
    assert "nasfast.ops.triton" not in lines
    if not torch.cuda.is_available():
        assert len([line for line in lines if line.startswith("nasfast has no kernels for cuda:0")]) == 1, lines
