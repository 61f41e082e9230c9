"""The Triton kernels against float64: on the GPU where there is one, else under Triton's interpreter on CPU tensors."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from devices import DEVICE, on_device, sampled
from kernel_cases import bn_act, mixed_bn
from kernel_cases.chain import (
    ACTS,
    BFLOAT16_CASES,
    CHAINS,
    DEPTHWISE,
    POINTWISE,
    ChainCase,
    Drawn,
    backward_arguments,
    check_kept,
    check_opcheck,
    converted_chain,
    eager_autocast,
    forward_arguments,
    mean_errors,
    run_chain,
)
from kernel_cases.chain import check as check_chain
from kernel_cases.mixed_bn import MixedCase
from tolerances import BFLOAT16_CHAIN

from nasfast import ops
from nasfast.ops import _triton, backends, reference
from nasfast.ops.registry import operators

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(_triton.why_missing() is not None, reason=str(_triton.why_missing())),
]
triton_chain = partial(ops.conv_bn_act_chain, backend="triton")
OPERATORS = operators("triton")

# Under the interpreter every operation of every program is a NumPy call: maps and widths of a few programs, and one
# stride of the kernels that have their own test of every width.
OTHERS = [ChainCase((2, 8, 5, 5), "dense4k3", shuffle=True, x_grad=False)]
SMALL = sampled(
    [
        case
        for case in POINTWISE + DEPTHWISE[::2] + CHAINS + OTHERS
        if case.pixels <= (160 if DEVICE == "cpu" else 10**5) and case.shape[1] <= 200
    ],
    4,
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Under the interpreter, tiles so wide that most cases are one program; the named tiles have their own test."""
    # PyTorch's convolutions would round float32 inputs
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    if DEVICE == "cpu":
        from nasfast.ops.triton import conv as conv_triton

        monkeypatch.setattr(conv_triton, "MIN_PROGRAMS", 0)


moved = partial(converted_chain, on_device)


def run_triton(drawn: Drawn, *, x_grad: bool = True) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in run_chain(triton_chain, moved(drawn), x_grad=x_grad).items()}


def check(case: ChainCase) -> None:
    check_chain(case, *case.draw(), run_triton)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_matches_float64_reference(case):
    check(case)


@pytest.mark.interpreter
@pytest.mark.parametrize(("kernel", "stride"), sampled(list(product((3, 5, 7), (1, 2))), 3))
def test_small_and_odd_maps(kernel, stride):
    for width in (1, 6, 17):
        check(ChainCase((2, 3, 2, width), f"dw{kernel}s{stride}"))
    check(ChainCase((1, 3, 9, 1), f"dw{kernel}s{stride}!"))


# how depthwise kernels cut maps into strips 7 (8, 14) wide, rows, images and blocks of 16 to 64 channels
CUTS = [
    ChainCase((2, 24, 9, 14), "dw3"),
    ChainCase((1, 3, 15, 28), "dw5s2/relu6"),
    ChainCase((2, 3, 14, 28), "dw7s2"),
    ChainCase((1, 3, 5, 16), "dw7"),
    ChainCase((1, 3, 5, 16), "dw5s2"),
    # the last result is in the middle of the last column of the map, not beside it
    ChainCase((2, 3, 13, 13), "dw3s2/relu"),
    # some images, and not a multiple of those of a program
    ChainCase((17, 1, 3, 5), "dw5"),
    ChainCase((5, 65, 2, 7), "dw3! dw3"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "programs"), sampled([(c, 0) for c in CUTS] + [(c, 10**9) for c in CUTS[1:6:2]]), ids=str
)
def test_maps_are_cut_into_strips(case, programs, monkeypatch):
    from nasfast.ops.triton import conv as conv_triton

    # the more programs, the fewer rows in each
    monkeypatch.setattr(conv_triton, "MIN_PROGRAMS", programs)
    check(case)


SIXTEEN_BITS = BFLOAT16_CASES + [
    ChainCase((4, 24, 5, 5), "pw48 dw3 pw24/identity", "x"),
    ChainCase((4, 24, 5, 5), "pw48/relu6 dw5s2/relu6 pw33/identity"),
    ChainCase((2, 3, 9, 9), "dense16k3s2 dw3 pw8", x_grad=False),
    ChainCase((2, 16, 5, 5), "pw8/relu dw7/identity pw8/relu", shuffle=True),
]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "dtype"),
    sampled(
        list(
            product([c for c in SIXTEEN_BITS if DEVICE == "cuda" or c.pixels <= 150], (torch.bfloat16, torch.float16))
        ),
        3,
    ),
    ids=str,
)
def test_16_bit_storage_is_no_worse_than_eager(case, dtype):
    # eager PyTorch rounds every stage to the storage type
    peer = eager_autocast if dtype == torch.bfloat16 else reference.conv_bn_act_chain
    ours, theirs = mean_errors(replace(case, dtype=dtype), run_triton, partial(run_chain, peer), draws=2)
    assert sum(ours.values()) <= 1.25 * sum(theirs.values()), (ours, theirs)
    assert ours["y"] <= BFLOAT16_CHAIN.relative


# the arithmetic of activations and modes is the chains'; here it is layouts, types and shapes
@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("case", "act", "training"),
    sampled(
        [(c, ACTS[i % len(ACTS)], i % 3 > 0) for i, c in enumerate(c for c in bn_act.CASES if c.dtype != torch.float64)]
    ),
    ids=str,
)
def test_bn_act_matches_float64_reference(case, act, training):
    bn_act.check_case(case, act, True, training, "triton")


MIXED = [
    case
    for case in [*mixed_bn.CASES, MixedCase((2, 6, 9, 7), "nxn", dtype=torch.float16)]
    if DEVICE == "cuda" or case.shape[0] * case.shape[2] * case.shape[3] <= 1000
]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", sampled(MIXED), ids=str)
def test_mixed_bn_matches_float64_reference(case):
    mixed_bn.check_case(case, "triton", DEVICE)


@pytest.mark.interpreter
@pytest.mark.parametrize("wanted", sampled(["nnnn", "xnnx", "nxnx", "xxxn", "xxnx"]))
def test_mixed_bn_computes_only_wanted_gradients(wanted):
    # runs of consecutive tensors are one launch
    case = MixedCase((2, 6, 5, 4), "nnnxnnnnnnnnnnxxnn")
    xs, gates, grad = case.draw(DEVICE)
    want = mixed_bn.run(partial(ops.mixed_bn, backend="triton"), xs, gates, grad, case.normalize)
    leaves = {"dgates": gates.requires_grad_(wanted[0] == "n")}
    for k, x in enumerate(xs):
        leaves[f"dx{k}"] = x.requires_grad_(wanted[1 + k % 3] == "n")
    ops.mixed_bn(xs, gates, normalize=case.normalize, eps=mixed_bn.EPS, backend="triton").backward(grad)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == leaf.requires_grad
        assert leaf.grad is None or torch.equal(leaf.grad, want[name]), name


def test_what_is_not_finite_stays_where_the_stencil_reaches():
    drawn = ChainCase((2, 4, 6, 6), "dw3/identity!").draw_once()
    drawn.x[0, :, 0, 0] = torch.inf
    device = moved(drawn)
    want = reference.conv_bn_act_chain(drawn.x, drawn.stages).isfinite()
    assert torch.equal(triton_chain(device.x, device.stages).cpu().isfinite(), want)


def test_two_runs_are_equal_bit_for_bit():
    # without a GPU programs run one after another: test_triton_disorder.py has them in other orders
    few = DEVICE == "cpu"
    case = ChainCase(
        (1, 4, 3, 3) if few else (3, 8, 5, 5), "pw8 dw3 pw4/identity" if few else "pw24 dw3 pw8/identity", "x"
    )
    first, second = (run_triton(case.draw_once()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    mixed = MixedCase((2, 4, 3, 3) if few else (2, 16, 9, 7), "nnx" if few else "nnnnx")
    triton_mixed = partial(ops.mixed_bn, backend="triton")
    first, second = (mixed_bn.run(triton_mixed, *mixed.draw(DEVICE), mixed.normalize) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_only_what_is_wanted_is_computed_and_kept():
    check_kept(triton_chain, moved(ChainCase((2, 8, 6, 6), "pw24 dw3 pw8/identity").draw_once()))


@pytest.mark.interpreter
def test_operators_pass_opcheck():
    check_opcheck(moved(ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity").draw_once()), OPERATORS)
    x, gamma, beta = (on_device(torch.randn(shape)) for shape in ((2, 5, 4, 4), 5, 5))
    arguments = (x.requires_grad_(), gamma, beta, None, None, None, 1e-5, "relu6")
    torch.library.opcheck(OPERATORS.bn_act_fwd.default, arguments)
    xs, gates, grad = MixedCase((2, 6, 4, 3), "nxn").draw(DEVICE)
    flags = [True, False, True]
    statistics = OPERATORS.mixed_bn_fwd(xs, gates, flags, 1e-5)[1]
    for wants in ([True] * 4, [False, True, False, False]):
        torch.library.opcheck(OPERATORS.mixed_bn_bwd.default, (grad, xs, gates, statistics, flags, 1e-5, wants))
    leaves = [x.requires_grad_() for x in xs]
    torch.library.opcheck(OPERATORS.mixed_bn_fwd.default, (leaves, gates.requires_grad_(), flags, 1e-5))


def test_tensors_of_another_plan_are_refused():
    # the kernels would read beyond their ends: a graph that was traced for one size has the plan of this size
    drawn = moved(ChainCase((2, 4, 3, 3), "pw8 dw3s2").draw_once())
    good = forward_arguments(drawn)
    first, second = good["conv_weights"]
    bad = ({"x": drawn.x[:1]}, {"conv_weights": [first[:4], second]}, {"add_input": True}, {"residual": drawn.x})
    for changed in bad:
        with pytest.raises(ValueError, match="conv_bn_act_chain.* this plan needs"):
            OPERATORS.conv_bn_act_chain_fwd(**good | changed)
    good = backward_arguments(drawn, OPERATORS)
    for changed in ({"grad": good["grad"][:1]}, {"saved": good["saved"][1:]}, {"add_input": True}):
        with pytest.raises(ValueError, match="conv_bn_act_chain: this plan"):
            OPERATORS.conv_bn_act_chain_bwd(**good | changed)


def test_tensors_it_cannot_serve_are_refused_with_the_reason():
    x = torch.ones(1, 2, 3, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="'triton'.*serves float32, bfloat16 and float16, got torch.float64"):
        ops.resolve_backend("bn_act", x.double(), "triton")
    with pytest.raises(RuntimeError, match="'triton'.*serves CPU tensors, got one on meta|serves CUDA tensors"):
        ops.resolve_backend("bn_act", x.to("meta"), "triton")
    assert backends.explain(DEVICE)
