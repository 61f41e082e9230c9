"""The Triton kernels do not depend on the order of their programs, and touch no memory but their own.

Under the interpreter, which runs programs one after another in a fixed order, with tiles so small that every launch is
several programs. `interpreter.disturbed` says what is disturbed.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from interpreter import disturbed
from kernel_cases.bn_act import Case
from kernel_cases.bn_act import run as run_bn_act
from kernel_cases.chain import ChainCase, run_chain
from kernel_cases.mixed_bn import MixedCase
from kernel_cases.mixed_bn import run as run_mixed

from nasfast import ops
from nasfast.ops import _triton

pytestmark = pytest.mark.skipif(
    _triton.why_missing() is not None or not _triton.interpreted(), reason="needs Triton and its interpreter"
)
if _triton.why_missing() is None:
    import triton
    import triton.language as tl

SMALL = {"BM": 16, "BN": 16, "BK": 16, "ELEMENTS": 64, "ROWS": 16, "CHANNELS": 16}
# channels, rows and pixels that no tile divides
CHAINS = {
    "pointwise": ChainCase((2, 17, 4, 5), "pw20/relu6 pw17/identity", "x"),
    "strides": ChainCase((1, 18, 5, 6), "dw3/relu6 dw5s2/tanh"),
    "dense": ChainCase((1, 3, 7, 9), "dense18k3s2/relu6 pw9", x_grad=False),
    "shuffle": ChainCase((2, 36, 3, 3), "pw20/relu dw3/identity pw18/relu", shuffle=True),
    "running": ChainCase((1, 6, 5, 6), "pw18! dw3! pw6!", "x"),
    "16 bits": replace(ChainCase((1, 17, 4, 5), "pw20 dw3 pw17/identity", "x"), dtype=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles, and groups of partial sums, so small that most launches have several of each."""
    from nasfast._triton import common
    from nasfast._triton.configs import FAMILIES
    from nasfast.ops.triton import bn as bn_triton

    for module in (common, bn_triton):
        monkeypatch.setattr(module, "GROUP", tl.constexpr(2))
    for family, config in FAMILIES.items():
        tile = {name: min(size, SMALL.get(name, size)) for name, size in config.tile.items()}
        monkeypatch.setitem(FAMILIES, family, config._replace(tile=tile))


def check(results):
    """results() under disturbance is what it is without, bit for bit."""
    # first, because a write to memory of others may end the process
    with disturbed():
        got = results()
    want = results()
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name):
    case = CHAINS[name]
    chain = partial(ops.conv_bn_act_chain, backend="triton")
    check(lambda: run_chain(chain, case.draw_once(), x_grad=case.x_grad))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_bn_act(layout):
    tensors = Case((2, 18, 4, 5), layout).inputs("relu6", residual=True)
    check(lambda: run_bn_act(partial(ops.bn_act, backend="triton"), tensors, act="relu6", training=True))


@pytest.mark.interpreter
def test_mixed_bn(monkeypatch):
    from nasfast.ops.triton import mixed as mixed_triton

    monkeypatch.setattr(mixed_triton, "TOGETHER", 2)
    case = MixedCase((2, 18, 3, 5), "nnxnn")
    check(lambda: run_mixed(partial(ops.mixed_bn, backend="triton"), *case.draw("cpu"), case.normalize))


# ---- the disturbance is one: kernels that must fail under it

if _triton.why_missing() is None:

    @triton.jit
    def copy_kernel(x, y, N, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):
        """y[i + TO] = x[i + FROM]: beyond an end where they are not 0."""
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i + TO, tl.load(x + i + FROM, mask=i < N), mask=i < N)

    @triton.jit
    def last_kernel(y, N, BLOCK: tl.constexpr):
        """y is the number of the program that came last."""
        tl.store(y + tl.arange(0, BLOCK), tl.program_id(0) + tl.zeros((BLOCK,), tl.float32))


@pytest.mark.parametrize(
    ("shift", "side"), [(1, "behind y: 4 bytes"), (-1, "before y: 4 bytes"), (100, "behind y: 128 bytes")]
)
def test_writing_beyond_a_tensor_is_noticed(shift, side):
    x, y = torch.arange(1.0, 33.0), torch.zeros(100)
    piece = y[8:40]  # inside the allocation
    with disturbed():
        copy_kernel[(2,)](x, piece, 32, FROM=0, TO=0, BLOCK=16)
        assert torch.equal(y, torch.nn.functional.pad(x, (8, 60)))
        with pytest.raises(AssertionError, match=f"copy_kernel writes {side}"):
            copy_kernel[(2,)](x, piece, 32, FROM=0, TO=shift, BLOCK=16)


def test_reading_beyond_a_tensor_is_noticed():
    x, y = torch.zeros(33), torch.zeros(32)
    copy_kernel[(2,)](x[:32], y, 32, FROM=1, TO=0, BLOCK=16)
    assert not y.isnan().any()
    with disturbed():
        copy_kernel[(2,)](x[:32], y, 32, FROM=1, TO=0, BLOCK=16)
    assert y.isnan().tolist() == [False] * 31 + [True]


def test_order_is_noticed():
    def results():
        y = torch.zeros(48)
        last_kernel[(3,)](y, 48, BLOCK=16)
        return {"y": y}

    with pytest.raises(AssertionError, match="y"):
        check(results)
