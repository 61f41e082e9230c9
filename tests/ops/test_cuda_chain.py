"""The CUDA kernels of chains against float64: on the GPU where there is one, else in their emulation on CPU tensors."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.chain import (
    ChainCase,
    ChainInputs,
    backward_arguments,
    check_kept,
    check_opcheck,
    check_wanted,
    converted,
    eager_autocast,
    exact_chain,
    forward_arguments,
    mean_errors,
    planned_numbers,
    relative_errors,
    run_chain,
)
from kernel_cases.cuda import ON_GPU, PLACE, cuda_chain, emulated_only, moved, needs_kernels, run_cuda, set_emulation

from nasfast import ops
from nasfast.ops import reference
from nasfast.ops.chain.plan import read_plan

pytestmark = [*needs_kernels, pytest.mark.usefixtures("emulation")]
TYPES = [torch.bfloat16, torch.float16]
OPERATORS = torch.ops.nasfast_cuda
# the largest relative error of one rounding
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}


# ---- results, given what the kernels stored


def kept_by(inputs: ChainInputs) -> tuple[torch.Tensor, ...]:
    """y, saved and statistics of the registered operator, in float64 on the CPU."""
    results = OPERATORS.conv_bn_act_chain_fwd(**forward_arguments(moved(inputs)))
    return tuple(tensor.cpu().double() for tensor in results)


def relative(got: torch.Tensor, want: torch.Tensor, floor: float = 0.0) -> float:
    """Norm of the error, relative to that of the truth or of the terms of its sums."""
    error = float((got.double() - want).norm()) / max(float(want.norm()), floor, 1e-30)
    return float("inf") if error != error else error


def note_terms(terms: dict[str, float], i: int, xhat: torch.Tensor, dz: torch.Tensor) -> None:
    """The sizes of what the gradients of BatchNorm add up."""
    terms |= {f"dbeta{i}": float(dz.norm()), f"dgamma{i}": float((dz * xhat).norm())}


def check_stages(inputs: ChainInputs, *, x_grad: bool = True) -> None:
    """Every number is what float64 makes of the outputs that the kernels stored.

    The float64 chain continues with the stored output of each convolution, so that both sides have the same slopes of
    relu and relu6, and what is compared is one stage's arithmetic in forward and rounding alone in backward.
    """
    rounding = ROUNDING[inputs.x.dtype]
    _, saved, statistics = kept_by(inputs)
    plan = read_plan(planned_numbers(inputs))
    x = inputs.x.double().requires_grad_(x_grad)
    a, leaves, terms = x, {"dx": x} if x_grad else {}, {}
    for i, (stage, planned) in enumerate(zip(inputs.stages, plan.stages, strict=True)):
        gamma, beta = (t.double().requires_grad_() for t in stage.params[1:3])
        leaves |= {f"dgamma{i}": gamma, f"dbeta{i}": beta}
        conv = F.conv2d(a, stage.params.conv_weight.double(), None, *stage[1:3], 1, stage.groups)
        n, channels, height, width = conv.shape
        stored = saved[planned.saved_at : planned.saved_at + conv.numel()].view(n, height, width, channels)
        y = conv + (stored.permute(0, 3, 1, 2) - conv).detach()
        # one rounding of y, and one of each input of a matrix product
        assert relative(y.detach(), conv.detach()) <= 2 * rounding, f"y of stage {i}"
        mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)
        got = statistics[planned.statistics_at : planned.statistics_at + 2 * channels].view(2, channels)
        assert relative(got[0], mean.detach(), float(y.detach().norm() / (y.numel() / channels) ** 0.5)) <= 1e-6
        assert relative(got[1], var.detach()) <= 1e-5, f"variance of stage {i}"
        xhat = (y - mean.view(-1, 1, 1)) * (var + stage.eps).rsqrt().view(-1, 1, 1)
        z = xhat * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1)
        z.register_hook(partial(note_terms, terms, i, xhat.detach()))
        a = reference.ACTIVATIONS[stage.act](z)
    residual = x if inputs.residual is inputs.x else inputs.residual
    y = a if residual is None else a + residual.double()
    y.backward(inputs.grad.double())
    ours = run_cuda(inputs, x_grad=x_grad)
    assert ours["y"].dtype == inputs.x.dtype
    assert relative(ours["y"], y.detach()) <= 1.2 * rounding
    for name, leaf in leaves.items():
        # every stage rounds dz once, and its matrix product dy once
        allowed = 3 * rounding * len(inputs.stages)
        assert relative(ours[name], leaf.grad, terms.get(name, 0.0)) <= allowed, name


STAGES = [
    ChainCase((2, 16, 5, 7), "pw24/relu6"),
    ChainCase((1, 8, 1, 2), "pw8/identity"),
    ChainCase((3, 168, 7, 7), "pw56/identity"),
    ChainCase((1, 40, 3, 3), "pw72/relu", "tensor"),
    ChainCase((1, 16, 9, 14), "pw168/relu6"),
    *(
        ChainCase((images, channels, *size), f"dw{kernel}s{stride}/{act}")
        for kernel, stride, act, (images, channels, *size) in [
            (3, 1, "relu6", (2, 16, 9, 8)),
            (3, 2, "relu", (1, 24, 7, 7)),
            (5, 1, "identity", (3, 8, 14, 5)),
            (5, 2, "relu6", (2, 40, 6, 11)),
            (7, 1, "relu", (1, 72, 8, 8)),
            (7, 2, "identity", (2, 8, 13, 2)),
            (3, 1, "relu6", (1, 168, 1, 3)),
        ]
    ),
    *(ChainCase((2, 8, 7, 9), "dw5/identity", residual) for residual in ("x", "tensor")),
]
# Narrow and wide stages in turn, so that both directions have tiles of every kind: depths of 8 to 1536 with and without
# a rest of 8 behind multiples of 16 and of a slab, several groups of columns, weights kept and streamed, rows that end
# within a tile.
POINTWISE = [
    ChainCase((1, 8, 1, 3), "pw8/relu pw16/identity"),
    ChainCase((3, 24, 13, 13), "pw72/relu6 pw24/identity", "x"),
    ChainCase((2, 32, 7, 9), "pw192/relu6 pw32/identity", "x"),
    ChainCase((5, 40, 11, 3), "pw168/relu pw40/relu", "tensor"),
    ChainCase((2, 56, 7, 7), "pw336/relu6 pw56/identity", "x"),
    ChainCase((1, 112, 5, 13), "pw672/relu6 pw112/identity", "x"),
    ChainCase((2, 128, 3, 9), "pw264/identity pw200/relu6"),
    ChainCase((1, 256, 7, 7), "pw1536/relu6 pw256/identity"),
    ChainCase((1, 16, 40, 41), "pw136/relu6 pw24/identity"),
    ChainCase((1, 40, 25, 40), "pw24/relu6 pw40/identity", "x"),
    # the most channels that a plan may have: backward has just enough shared memory
    ChainCase((1, 8, 2, 3), "pw3136/relu6 pw8/identity", "x"),
]
BLOCKS = [
    ChainCase((2, 16, 9, 7), "dw3/relu6 pw24/identity"),
    ChainCase((3, 24, 8, 8), "dw5s2/relu6 pw8/identity"),
    ChainCase((2, 24, 7, 9), "pw72/relu6 dw3/relu6 pw24/identity", "x"),
    ChainCase((1, 56, 7, 7), "pw168/relu6 dw7/relu6 pw56/identity", "x"),
    ChainCase((2, 24, 10, 6), "pw72/relu6 dw5s2/relu6 pw40/identity"),
    ChainCase((1, 24, 14, 14), "pw144/relu6 dw3/relu6 pw24/identity", "x"),
    ChainCase((3, 8, 9, 5), "pw48/relu dw7s2/relu pw16/identity", "tensor"),
    ChainCase((2, 8, 6, 5), "pw16/relu pw24/identity dw3/relu dw5s2/relu pw8/relu6", "tensor"),
]
# stems: one to three channels, both strides, few and many output channels, bands of rows and of columns
STEMS = [
    ChainCase(shape, units, x_grad=False)
    for shape, units in [
        ((2, 3, 9, 16), "dense40k3s2/relu6"),
        ((1, 3, 70, 24), "dense32k3s2/relu6 dw3/relu6 pw16/identity"),
        ((3, 1, 7, 8), "dense16k3/relu dw3s2/relu"),
        ((2, 2, 5, 20), "dense48k3/identity pw24/relu"),
        ((1, 3, 3, 280), "dense8k3s2/relu6 dw3/relu6"),
        ((1, 1, 2, 2056), "dense8k3/relu6"),
        # more bands than blocks
        ((1030, 1, 1, 8), "dense8k3/relu6"),
    ]
]


@pytest.mark.parametrize("dtype", TYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", STAGES + POINTWISE + BLOCKS + STEMS, ids=str)
def test_numbers_are_those_of_float64_given_what_is_stored(case, dtype):
    check_stages(replace(case, dtype=dtype).draw_once(), x_grad=case.x_grad)


@pytest.mark.parametrize(
    "shape",
    [
        (3, 8, 1, 1),  # one pixel
        (2, 8, 3, 8),  # one column behind a strip: the halo of the strip before it is partly inside
        (2, 8, 9, 9),
        (1, 8, 2, 15),
        (2, 8, 14, 14),  # whole strips
        (1, 24, 13, 2),  # narrower than a strip
        (1, 168, 3, 5),  # several groups of channels, the last one smaller
    ],
    ids=str,
)
@pytest.mark.parametrize(("kernel", "stride"), list(product((3, 5, 7), (1, 2))))
def test_stencils_take_any_size(kernel, stride, shape):
    units = f"dw{kernel}s{stride}/identity"
    if shape == (2, 8, 9, 9):  # the stencil reads another one through its BatchNorm, and pads behind that
        units = f"dw3/relu6 {units}"
    check_stages(ChainCase(shape, units, dtype=TYPES[stride % 2]).draw_once())


# where a block has as much shared memory as on an H200: stencils on tensor cores, wide tiles and deep slabs
H200 = {"shared_memory": 227}
LARGE = [
    ChainCase(shape, f"dw{kernel}/identity")
    for kernel, shape in [
        (5, (2, 8, 1, 9)),  # one row
        (7, (2, 40, 14, 14)),  # several groups of channels, the last one smaller
        (5, (1, 8, 13, 16)),
        (7, (1, 8, 15, 17)),  # two panels of rows
        (5, (1, 16, 30, 27)),
        (7, (1, 8, 29, 33)),
        (5, (1, 8, 43, 56)),  # the widest
        (7, (1, 8, 3, 55)),  # fewer rows than the stencil
        (7, (3, 40, 7, 7)),  # two images are a panel, and the last one has a panel of its own
        (7, (2, 8, 5, 8)),
        (7, (2, 8, 1, 1)),
    ]
]
LARGE += [ChainCase((2, 8, 7, 9), "dw5/identity", residual) for residual in ("x", "tensor")]
LARGE += [ChainCase((2, 16, 10, 19), f"dw3/identity dw{kernel}/identity") for kernel in (5, 7)]
LARGE += [
    ChainCase((2, 16, 15, 18), f"pw32/{act} dw{kernel}/{act}") for kernel, act in product((5, 7), ("relu", "relu6"))
]
LARGE += [ChainCase((2, 104, 7, 7), "pw264/identity pw16/identity")]


@pytest.mark.parametrize("dtype", TYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_numbers_with_the_shared_memory_of_an_h200(case, dtype):
    set_emulation(**H200)
    check_stages(replace(case, dtype=dtype).draw_once())


@emulated_only
@pytest.mark.parametrize(
    ("kernel", "stride", "size", "on_tensor_cores"),
    [
        (3, 1, (2, 14), False),
        (5, 2, (2, 14), False),
        (5, 1, (2, 8), False),
        (5, 1, (2, 9), True),
        (7, 1, (2, 56), True),
        (7, 1, (2, 57), False),
        (7, 1, (7, 8), True),
        (7, 1, (8, 8), False),
    ],
    ids=str,
)
def test_which_stencils_run_on_tensor_cores(kernel, stride, size, on_tensor_cores):
    """They round a float32 filter, and the stencils of threads do not."""
    inputs = ChainCase((1, 8, *size), f"dw{kernel}s{stride}/identity", dtype=torch.bfloat16).draw_once()
    (stage,) = inputs.stages
    weight = stage.params.conv_weight + 2**-10 * torch.randn(8, 1, kernel, kernel)
    for settings in ({}, H200):
        set_emulation(**settings)
        results = []
        for filters in (weight, weight.bfloat16().float()):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(
                    cuda_chain(inputs.x, [stage._replace(params=stage.params._replace(conv_weight=filters))])
                )
        assert torch.equal(*results) == (on_tensor_cores and settings == H200)


@pytest.mark.parametrize("mean", [1e3, -30.0])
def test_channels_far_from_zero_keep_their_variance(mean):
    # y is stored with steps of up to 4, so only what is stored can be compared
    check_stages(replace(BLOCKS[2], dtype=torch.bfloat16, mean=mean).draw_once())
    check_stages(replace(STEMS[1], dtype=torch.bfloat16, mean=mean).draw_once(), x_grad=False)


@pytest.mark.parametrize("dtype", TYPES, ids=["bfloat16", "float16"])
def test_weights_may_be_float32(dtype):
    inputs = replace(BLOCKS[2], dtype=dtype).draw_once()
    wide = [s._replace(params=s.params._replace(conv_weight=s.params.conv_weight.float())) for s in inputs.stages]
    narrow = moved(inputs)
    want = cuda_chain(narrow.x, narrow.stages)
    inputs = moved(inputs._replace(stages=wide))
    with torch.autocast(PLACE, dtype):
        got = cuda_chain(inputs.x.float(), inputs.stages)
    assert got.dtype == dtype
    assert torch.equal(got, want)


@emulated_only
@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
def test_any_division_into_blocks_gives_the_same_numbers(multiprocessors):
    set_emulation(multiprocessors)
    for case in (BLOCKS[2], STAGES[2], ChainCase((9, 16, 12, 12), "dw3/relu6 pw8/identity")):
        check_stages(replace(case, dtype=torch.bfloat16).draw_once())


@emulated_only
@pytest.mark.parametrize(
    ("shape", "units"),
    [
        ((1, 16, 61, 60), "pw24/relu6 pw8/identity"),
        ((50, 128, 9, 8), "dw3/identity"),
        ((2, 24, 40, 8), "dw7s2/identity"),
    ],
)
def test_sums_of_many_blocks_are_added_on_two_levels(shape, units):
    """With many multiprocessors, rows of stencils are cut into segments, too."""
    set_emulation(200)
    check_stages(ChainCase(shape, units, dtype=torch.bfloat16).draw_once())


# ---- against eager PyTorch


# Without a kink every single result is compared. Behind one, rounding chooses the slope of some elements, so that an
# error is a sum of few large ones, here as in PyTorch.
SMOOTH = [
    ChainCase((4, 24, 14, 14), "pw72/identity dw3/identity pw24/identity", "x"),
    ChainCase((2, 56, 13, 9), "pw56/identity dw5s2/identity pw40/identity"),
]
KINKED = [
    ChainCase((4, 24, 14, 14), "pw144/relu6 dw3/relu6 pw24/identity", "x"),
    ChainCase((4, 40, 14, 13), "dw7/relu6 pw24/identity"),
    ChainCase((4, 24, 15, 14), "pw72/relu dw5s2/relu pw56/identity"),
    ChainCase((4, 3, 23, 24), "dense32k3s2/relu6 dw3/relu6 pw16/identity", x_grad=False),
]


@pytest.mark.parametrize("dtype", TYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", SMOOTH + KINKED, ids=str)
def test_errors_are_no_larger_than_those_of_eager_autocast(case, dtype):
    # eager PyTorch rounds every stage to the storage type
    peer = eager_autocast if dtype == torch.bfloat16 else reference.conv_bn_act_chain
    ours, theirs = mean_errors(replace(case, dtype=dtype), run_cuda, partial(run_chain, peer), draws=2)
    assert ours["y"] <= min(2e-2, 1.1 * theirs["y"]), (ours, theirs)
    assert sum(ours.values()) <= 1.1 * sum(theirs.values()), (ours, theirs)
    for name in ours if case in SMOOTH else ():
        # a sum over all pixels is nearly exact on both sides, and may be so by chance on one of them
        assert ours[name] <= min(2e-2, 1.1 * theirs[name] + ROUNDING[dtype] / 2), (name, ours, theirs)


# ---- hostile numbers


@pytest.mark.parametrize("place", ["x", "weight"])
@pytest.mark.parametrize(
    "units", ["pw16/relu6", "dw3/relu6", "pw48/relu6 dw5s2/relu6 pw8/identity", "dense16k3s2/relu6"]
)
def test_not_a_number_reaches_the_result(units, place):
    shape = (2, 3, 6, 8) if units.startswith("dense") else (2, 8, 6, 6)
    inputs = replace(ChainCase(shape, units), dtype=torch.bfloat16).draw_once()
    if place == "x":
        inputs.x[1, 2, 2, 3] = torch.nan
    else:
        inputs.stages[0].params.conv_weight[5, 0, 0, 0] = torch.nan
    want = reference.conv_bn_act_chain(inputs.x.double(), [widened(stage) for stage in inputs.stages])
    placed = moved(inputs)
    got = cuda_chain(placed.x, placed.stages).cpu()
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())


def widened(stage: ops.Stage) -> ops.Stage:
    return stage._replace(params=converted(torch.Tensor.double, stage.params))


def test_not_a_number_in_the_gradient_reaches_what_it_must():
    inputs = replace(BLOCKS[2], dtype=torch.bfloat16).draw_once()
    inputs.grad[0, 3, 2, 2] = torch.nan
    want, got = exact_chain(inputs).tensors, run_cuda(inputs)
    assert int(got["dbeta2"].isnan().sum()) == 1 and got["dx"].isnan().all()
    for name, tensor in got.items():
        assert torch.equal(tensor.isnan(), want[name].isnan()), name


HIDDEN = ChainCase((3, 48, 9, 7), "pw96/relu dw3/relu pw48/identity", "x")


def measure_errors(inputs: ChainInputs) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the kernels and of eager autocast, relative to float64."""
    exact = exact_chain(inputs)
    return relative_errors(run_cuda(inputs), exact), relative_errors(run_chain(eager_autocast, inputs), exact)


@pytest.mark.parametrize("grad_scale", [1e-4, 1e4], ids=str)
def test_float16_gradients_keep_their_relative_size(grad_scale):
    # the coefficients of BatchNorm's gradient leave the range of float16 here
    inputs = replace(HIDDEN, dtype=torch.float16).draw_once()
    got = run_cuda(inputs._replace(grad=inputs.grad / 64))["dx"]
    scaled = run_cuda(inputs._replace(grad=inputs.grad / 64 * grad_scale))["dx"]
    assert torch.isfinite(scaled).all()
    error = relative(scaled / grad_scale, got.double())
    assert error < (0.05 if grad_scale < 1 else 5e-3)


def test_float16_gradients_whose_mean_is_far_from_zero_cancel():
    # BatchNorm takes the mean of dz away, which here is 30 times as large as what is left
    inputs = replace(HIDDEN, dtype=torch.float16).draw_once()
    inputs = inputs._replace(grad=inputs.grad + 30 * inputs.grad.std())
    ours, theirs = measure_errors(inputs)
    for name, error in ours.items():
        assert error <= 1.1 * theirs[name] + 1e-3, (name, ours, theirs)


def test_a_gamma_close_to_zero_has_an_exact_gradient():
    # the bounds of the relu are then a million deviations from the mean, and further
    inputs = replace(HIDDEN, dtype=torch.bfloat16).draw_once()
    inputs.stages[0].params.bn_weight.fill_(1e-6)
    inputs.stages[0].params.bn_bias.fill_(1.0)
    ours, theirs = measure_errors(inputs)
    assert ours["dgamma0"] <= 1.25 * theirs["dgamma0"], (ours, theirs)


def test_channels_that_do_not_vary_give_finite_results():
    inputs = replace(BLOCKS[2], dtype=torch.bfloat16).draw_once()
    inputs.x.fill_(3.7)
    assert all(tensor.isfinite().all() for tensor in run_cuda(inputs).values())


# ---- the same bits


ORDERS = [{"backwards": True}, {"block_order": 1}, {"block_order": 7, "backwards": True}, {"block_order": 8}]


# with so many multiprocessors that the results of groups of blocks are added too, and with few
ORDERED = [
    *((BLOCKS[i], {"multiprocessors": 60}) for i in (1, 2, 4)),
    (ChainCase((9, 16, 12, 12), "pw24/relu6"), {"multiprocessors": 60}),
    (ChainCase((50, 3, 4, 8), "dense16k3/relu6 dw3/relu6", x_grad=False), {"multiprocessors": 60}),
    (ChainCase((2, 24, 9, 8), "pw72/relu6 pw136/relu pw24/identity", "x"), {"multiprocessors": 7}),
    (ChainCase((50, 128, 9, 8), "dw3/identity"), {"multiprocessors": 132}),
    # a block has one panel after the other or only one
    *((ChainCase((50, 8, 2, 9), "dw3/relu6 dw5/relu6"), {"multiprocessors": count, **H200}) for count in (2, 132)),
    (ChainCase((41, 8, 2, 4), "dw3/relu6 dw7/relu6"), {"multiprocessors": 2, **H200}),
]


@pytest.mark.parametrize(("case", "settings"), ORDERED, ids=str)
def test_neither_repetition_nor_the_order_of_threads_and_blocks_changes_a_bit(case, settings):
    inputs = replace(case, dtype=torch.bfloat16).draw_once()
    orders = [{}, {}] if ON_GPU else [{}, {}, *ORDERS]
    results = []
    for order in orders:
        set_emulation(**settings, **order)
        results.append(run_cuda(inputs, x_grad=case.x_grad))
    for result, order in zip(results[1:], orders[1:], strict=True):
        for name, tensor in result.items():
            assert torch.equal(tensor, results[0][name]), (name, order)


def test_counters_are_zeros_before_and_after(monkeypatch):
    from nasfast.ops.chain import cuda as conv

    launches, zeros = [], conv.zeros
    monkeypatch.setattr(conv, "zeros", lambda *arguments: launches.append(zeros(*arguments)) or launches[-1])
    set_emulation(60)
    run_cuda(replace(BLOCKS[2], dtype=torch.bfloat16).draw_once())
    assert len(launches) == 2 and min(len(counters) for counters in launches) > 1
    assert not any(counters.any() for counters in launches)


def test_tensors_may_begin_anywhere():
    """Slices of larger tensors, as in a flat buffer of parameters."""
    inputs = moved(replace(BLOCKS[2], dtype=torch.bfloat16).draw_once())
    want = run_chain(cuda_chain, inputs)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.permute(0, 2, 3, 1).contiguous() if tensor.shape == inputs.x.shape else tensor
        place = torch.empty(rows.numel() + 1, dtype=rows.dtype, device=rows.device)[1:].view(rows.shape).copy_(rows)
        return place.permute(0, 3, 1, 2) if rows is not tensor else place

    stages = [s._replace(params=converted(shifted, s.params)) for s in inputs.stages]
    got = run_chain(cuda_chain, ChainInputs(x := shifted(inputs.x), stages, x, False, shifted(inputs.grad)))
    for name, tensor in got.items():
        assert name.startswith("running") or torch.equal(tensor, want[name]), name


# ---- autograd, memory and compilers


def test_memory_that_is_kept_is_that_of_the_plan():
    check_kept(cuda_chain, moved(replace(BLOCKS[2], dtype=torch.bfloat16).draw_once()))


def test_only_wanted_gradients_exist_and_are_the_same():
    inputs = moved(replace(BLOCKS[2], dtype=torch.bfloat16).draw_once())
    want = run_chain(cuda_chain, inputs)
    for wants in (["dx"], ["dgamma0"], ["dbeta1"], ["dgamma2", "dbeta2"], ["dx", "dbeta0"], ["dgamma1", "dbeta2"]):
        check_wanted(cuda_chain, inputs, wants, want)


@emulated_only  # it reads allocations on the CPU
@pytest.mark.parametrize("settings", [{}, H200], ids=["threads", "tensor_cores"])
@pytest.mark.parametrize("units", ["dw3/relu6 dw3/identity", "pw16/relu6 dw5s2/relu6", "pw16/relu6 dw7/relu6"])
def test_a_gradient_that_nothing_reads_is_not_written(units, settings):
    """Where the input needs no gradient, the first stage needs only sums over its dz; the second one is depthwise."""
    set_emulation(**settings)
    inputs = ChainCase((2, 16, 14, 13), units, dtype=torch.bfloat16).draw_once()
    results, allocated = [], []
    for x_grad in (True, False):
        with torch.profiler.profile(profile_memory=True) as profile:
            results.append(run_cuda(inputs, x_grad=x_grad))
        allocated.append({event.cpu_memory_usage for event in profile.events() if event.name == "aten::new_empty"})
    want, got = results
    assert set(want) - set(got) == {"dx"}
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
    size = 2 * inputs.x.numel()  # that of the output of the first stage, too
    assert size in allocated[0] and size not in allocated[1]


def test_operators_pass_opcheck():
    case = ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity", dtype=TYPES[0])
    check_opcheck(moved(case.draw_once()), OPERATORS)


# ---- what is refused


def test_tensors_of_another_plan_are_refused():
    # the kernels would read beyond their ends: a graph that was traced for one size has the plan of this size
    inputs = moved(replace(ChainCase((2, 8, 3, 3), "pw16/relu dw3s2/relu"), dtype=TYPES[0]).draw_once())
    good = forward_arguments(inputs)
    x, weights, affine, running = good["x"], good["conv_weights"], good["bn_weights"], torch.ones(16, device=PLACE)
    for bad, message in (
        ({"x": x[:1]}, "x must be channels_last"),
        ({"x": x.contiguous()}, "x must be channels_last"),
        ({"x": x.float()}, "need bfloat16 or float16"),
        ({"conv_weights": [weights[0][:8], weights[1]]}, "conv_weight must be contiguous"),
        ({"conv_weights": [weights[0].half(), weights[1]]}, "conv_weight must be contiguous .* of the right type"),
        ({"bn_weights": [affine[0].double(), affine[1]]}, "bn_weight must be contiguous .* of the right type"),
        ({"bn_biases": [affine[0][:8], affine[1]]}, "bn_bias must be contiguous"),
        ({"add_input": True}, "what is added must be channels_last"),
        ({"residual": x}, "what is added must be channels_last"),
        ({"running_means": [running, running]}, "use the statistics of the batch"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"conv_bn_act_chain.*{message}"):
            OPERATORS.conv_bn_act_chain_fwd(**good | bad)
    good = backward_arguments(inputs, OPERATORS)
    OPERATORS.conv_bn_act_chain_bwd(**good)
    for bad, message in (
        ({"grad": good["grad"][:1]}, "grad must be channels_last"),
        ({"saved": good["saved"][1:]}, "saved must be contiguous and have"),
        ({"add_input": True}, "grad, to be added, must be channels_last"),
        ({"batch_statistics": [True, False]}, "use the statistics of the batch"),
        ({"statistics": good["statistics"][1:]}, "statistics must be contiguous and have"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"conv_bn_act_chain.*{message}"):
            OPERATORS.conv_bn_act_chain_bwd(**good | bad)


@pytest.mark.parametrize(
    ("case", "recompute", "message"),
    [
        (ChainCase((2, 8, 3, 3), "pw16/tanh"), False, "got kind 0, 8 -> 16 channels and activation 3"),
        (ChainCase((2, 8, 3, 3), "pw12/relu"), False, "8 -> 12 channels"),
        (ChainCase((2, 2, 3, 3), "dense8k3/relu"), False, "got kind 2"),
        (ChainCase((2, 16, 3, 3), "pw8/relu", shuffle=True), False, "do not shuffle"),
        (ChainCase((2, 8, 3, 3), "pw16/relu dw3/relu"), True, "compute no output again"),
    ],
    ids=["act", "channels", "dense", "shuffle", "recompute"],
)
def test_plans_that_the_kernels_cannot_run_are_refused(case, recompute, message):
    inputs = moved(replace(case, dtype=TYPES[0]).draw_once())
    with pytest.raises(RuntimeError, match=message):
        OPERATORS.conv_bn_act_chain_fwd(**forward_arguments(inputs, recompute=recompute))


def test_too_few_counters_are_refused(monkeypatch):
    from nasfast.ops.chain import cuda as conv

    monkeypatch.setattr(conv, "zeros", lambda count, device: torch.zeros(count - 1, dtype=torch.int32, device=device))
    with pytest.raises(RuntimeError, match="needs 1 counters, int32 zeros on the device of the input, got 0"):
        run_cuda(replace(STAGES[1], dtype=TYPES[0]).draw_once())
