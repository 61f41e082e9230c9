"""The native chain of convolution, BatchNorm and activation against float64, element by element."""

import re
import threading
import warnings
import weakref
from contextlib import contextmanager
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from kernel_cases.chain import (
    ACTS,
    BFLOAT16,
    BFLOAT16_CASES,
    CHAINS,
    DEPTHWISE,
    PLANS,
    POINTWISE,
    ChainCase,
    Drawn,
    check,
    check_bfloat16,
    check_case,
    exact_chain,
    native_autocast,
    native_chain,
    planned_numbers,
    run_chain,
    widened_chain,
)
from tolerances import NATIVE_CHAIN, assert_close
from torch.utils.checkpoint import checkpoint

from nasfast import ops
from nasfast.ops import ConvBNParams, Stage, reference
from nasfast.ops import plan as planning
from nasfast.ops.modules import FusedInvertedResidual

CASES = POINTWISE + DEPTHWISE + CHAINS + PLANS
EXPANSIONS = [case for case in CHAINS + PLANS if re.match(r"pw\d+\S* dw", case.units) and case.pixels < 10**4]


@contextmanager
def planned(*, recompute):
    """Every expansion is computed again, or none, whatever the thresholds say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MIN_RECOMPUTED_EXPANSION", 0)
        patch.setattr(planning, "MAX_RECOMPUTED_CHANNELS", 10**9 * recompute)
        planning._decide_once.cache_clear()
        yield
    planning._decide_once.cache_clear()


@pytest.fixture(params=["recomputed", "stored"])
def plan(request):
    """Each plan for an expansion."""
    with planned(recompute=request.param == "recomputed"):
        yield request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64_reference(case, native):
    check_case(case)


@pytest.mark.parametrize("case", EXPANSIONS, ids=str)
def test_either_plan_matches_float64_reference(case, plan, native):
    check_case(case)


def test_the_oracle_is_the_reference():
    for case in CHAINS + PLANS:
        if case.pixels > 10**4:
            continue
        drawn, exact = case.draw()
        want = run_chain(reference.conv_bn_act_chain, widened_chain(drawn), x_grad=case.x_grad)
        for name, tensor in exact.tensors.items():
            assert_close(name, tensor, want[name])


@pytest.mark.parametrize(("kernel", "stride"), list(product((3, 5, 7), (1, 2))))
def test_every_width(kernel, stride, native):
    for width in range(1, 18):
        check_case(ChainCase((2, 3, 2, width), f"pw5 dw{kernel}s{stride}"))
        check_case(ChainCase((2, 3, width, 2), f"dw{kernel}s{stride} pw5"))


UNITS = st.one_of(
    st.builds("pw{}".format, st.integers(1, 40)),
    st.builds("dw{}s{}".format, st.sampled_from((3, 5, 7)), st.sampled_from((1, 2))),
)
ENDED_UNITS = st.builds("{}/{}{}".format, UNITS, st.sampled_from(ACTS), st.sampled_from(("", "", "!")))
RANDOM_CASES = st.builds(
    ChainCase,
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12)),
    units=st.lists(ENDED_UNITS, min_size=1, max_size=4).map(" ".join),
    residual=st.sampled_from(("none", "tensor")),
    layout=st.sampled_from(("nhwc", "nchw", "strided")),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=RANDOM_CASES, recompute=st.booleans())
def test_random_chains_match_float64_reference(native, case, recompute):
    n, _, height, width = case.shape
    for unit in case.units.split():
        if "s2" in unit:
            height, width = (height + 1) // 2, (width + 1) // 2
        assume("!" in unit or n * height * width > 1)
    with planned(recompute=recompute):
        try:
            drawn, exact = case.draw()
        except ValueError:
            assume(False)
        check(case, drawn, exact)


# ---- bfloat16


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16"])
@pytest.mark.parametrize("case", BFLOAT16_CASES, ids=str)
def test_bfloat16_is_no_worse_than_eager_autocast(case, autocast, native):
    check_bfloat16(case, autocast=autocast)


@pytest.mark.parametrize("case", BFLOAT16_CASES[:4], ids=str)
def test_bfloat16_gradients_with_a_large_mean(case, plan, native):
    # the projections of BatchNorm's backward remove what all pixels share
    check_bfloat16(case, shift=20.0)


def test_autocast_computes_in_bfloat16_what_bfloat16_inputs_give(native):
    drawn = ChainCase((4, 24, 14, 14), "pw144 dw3 pw24/identity", "tensor", dtype=BFLOAT16).draw_once()
    want = run_chain(native_chain, drawn)
    got = run_chain(native_autocast, drawn)
    assert all(torch.equal(got[name], want[name]) for name in want)
    wide = (
        drawn.x.float(),
        [s._replace(params=s.params._replace(conv_weight=s.params[0].float())) for s in drawn.stages],
    )
    y = native_autocast(*wide)
    assert y.dtype == BFLOAT16
    assert torch.equal(y, native_chain(drawn.x, drawn.stages))
    # PyTorch's promotion: a float32 residual makes a float32 sum
    mixed = native_autocast(*wide, residual=wide[0])
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, y + wide[0], rtol=0, atol=0)


# ---- hostile numbers


def test_not_a_number_stays_in_its_channel(native):
    # three groups of channels: what one leaves behind in a shared row must not reach the next
    drawn = ChainCase((2, 1100, 5, 5), "dw7 dw7s2").draw_once()
    channel, group = 700, torch.arange(1100)
    drawn.x[0, channel, 2, 2] = torch.nan
    drawn.grad[1, 42, 1, 1] = torch.inf
    spoilt = (group == channel) | (group == 42)
    for name, tensor in run_chain(native_chain, drawn).items():
        rest = tensor[~spoilt] if tensor.ndim == 1 else tensor[:, ~spoilt]
        assert rest.isfinite().all(), name
    y = native_chain(drawn.x, drawn.stages)
    assert y[:, channel].isnan().all()


@pytest.mark.parametrize("act", ["identity", "tanh"])
def test_not_a_number_in_the_gradient_stays_in_its_channel(act, native):
    # a wide map has two groups of channels, the second of partial vectors; these activations let NaN through
    drawn = ChainCase((3, 40, 3, 500), f"pw40/{act} dw5/{act}").draw_once()
    drawn.grad[1, 24, 1, 1] = torch.nan
    others = torch.arange(40) != 24
    affine = {name: t for name, t in run_chain(native_chain, drawn).items() if name.startswith("d") and t.ndim == 1}
    assert len(affine) == 4
    for name, tensor in affine.items():
        assert tensor[others].isfinite().all() and tensor[24].isnan(), name


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_images_do_not_see_each_other_in_eval_mode(dtype, plan, native):
    drawn = ChainCase((4, 8, 9, 9), "pw24 dw3 pw8/identity", "x").draw_once()
    x = drawn.x.to(dtype)
    stages = [
        s._replace(
            training=False,
            params=s.params._replace(
                conv_weight=s.params.conv_weight.to(dtype),
                running_mean=torch.zeros_like(s.params.bn_bias),
                running_var=torch.ones_like(s.params.bn_bias),
            ),
        )
        for s in drawn.stages
    ]
    want = torch.cat([native_chain(x[i : i + 1], stages) for i in range(4)])
    x[1], x[2] = torch.nan, 1e20
    got = native_chain(x, stages)
    assert torch.equal(got[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("units", ["pw5", "dw3", "pw40 dw3 pw8"])
def test_not_a_number_spreads_as_far_as_its_sums(units, plan, native):
    drawn = ChainCase((2, 8, 5, 5), units).draw_once()
    drawn.x[0, 3, 2, 2] = torch.nan
    got, want = (f(drawn.x, drawn.stages) for f in (native_chain, reference.conv_bn_act_chain))
    assert torch.equal(got.isnan(), want.isnan())


def test_channels_that_do_not_vary_give_finite_results(plan, native):
    drawn = ChainCase((2, 8, 5, 5), "pw24 dw3 pw8/identity", "x").draw_once()
    drawn.x.fill_(3.7)
    exact = exact_chain(drawn)
    for name, tensor in run_chain(native_chain, drawn).items():
        assert tensor.isfinite().all(), name
        if name.startswith("running"):
            assert_close(name, tensor, exact.tensors[name], NATIVE_CHAIN, floor=exact.floors[name])


def test_nearly_equal_channels_keep_their_difference(plan, native):
    """The expansion's variance comes from second moments of x, and W may take the difference of two large ones."""
    one = torch.randn(4, 1, 16, 16)
    x = torch.cat([one, one + 1e-2 * torch.randn_like(one)], dim=1).contiguous(memory_format=torch.channels_last)
    weight = torch.tensor([[1.0, -1.0], [1.0, 1.0], [0.5, 0.5], [-1.0, 1.0]]).view(4, 2, 1, 1)
    affine = torch.ones(4), torch.zeros(4), torch.zeros(4), torch.ones(4)
    stages = [
        Stage(ConvBNParams(weight, *affine), act="tanh", momentum=1.0),
        Stage(ConvBNParams(torch.randn(4, 1, 3, 3) / 3, *affine), 1, 1, 4, "identity", momentum=0.0),
    ]
    drawn = Drawn(x, stages, None, False, torch.randn(4, 4, 16, 16))
    exact = exact_chain(drawn)
    for name, tensor in run_chain(native_chain, drawn).items():
        assert_close(name, tensor, exact.tensors[name], NATIVE_CHAIN, floor=exact.floors[name])


# ---- determinism and threads

BIG = [
    ChainCase((4, 24, 40, 40), "pw144/relu6 dw3/relu6 pw24/identity", "x"),
    ChainCase((2, 72, 28, 28), "pw144/relu6 dw7s2/relu6 pw72/identity"),
    ChainCase((1, 32, 120, 16), "dw5 pw40 dw3s2", dtype=BFLOAT16),
    ChainCase((4, 3, 40, 40), "dense24k3s2 dw3 pw16", x_grad=False),
    ChainCase((2, 48, 28, 28), "pw24/relu dw3/identity pw24/relu", shuffle=True),
    ChainCase((2, 16, 257, 256), "dw3 pw16/relu6 dw3/relu6 pw16"),
]


@pytest.mark.parametrize("case", BIG, ids=str)
def test_bitwise_equal_for_every_run_and_thread_count(case, native):
    drawn = case.draw_once()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run_chain(native_chain, drawn, x_grad=case.x_grad)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, tensor in run_chain(native_chain, drawn, x_grad=case.x_grad).items():
                assert torch.equal(tensor, single[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


def test_concurrent_python_threads_give_the_serial_bits(native):
    drawn = [case.draw_once() for case in BIG[:3]]
    serial = [run_chain(native_chain, inputs) for inputs in drawn]
    start = threading.Barrier(2 * len(drawn))
    differences = []

    def work(i):
        torch.set_num_threads(1)
        start.wait()
        for _ in range(4):
            got = run_chain(native_chain, drawn[i])
            differences.extend((i, name) for name in got if not torch.equal(got[name], serial[i][name]))

    workers = [threading.Thread(target=work, args=(i % len(drawn),)) for i in range(2 * len(drawn))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert differences == []


# ---- autograd


def leaves_of(drawn: Drawn) -> dict[str, torch.Tensor]:
    """Copies of x and every affine parameter, and stages that use them."""
    leaves = {"dx": drawn.x.clone()}
    for i, stage in enumerate(drawn.stages):
        leaves |= {f"dgamma{i}": stage.params.bn_weight.clone(), f"dbeta{i}": stage.params.bn_bias.clone()}
    return leaves


def with_leaves(drawn: Drawn, leaves: dict[str, torch.Tensor]) -> list[Stage]:
    return [
        stage._replace(params=stage.params._replace(bn_weight=leaves[f"dgamma{i}"], bn_bias=leaves[f"dbeta{i}"]))
        for i, stage in enumerate(drawn.stages)
    ]


@pytest.mark.parametrize("units", ["pw18 dw3 pw6/identity", "pw18! dw3! pw6/identity!"])
def test_only_wanted_gradients_exist(units, plan, native):
    drawn, exact = ChainCase((2, 6, 5, 4), units).draw()
    names = list(leaves_of(drawn))
    for wanted in product([True, False], repeat=len(names)):
        leaves = leaves_of(drawn)
        asked = [name for name, ask in zip(names, wanted, strict=True) if ask]
        for name in asked:
            leaves[name].requires_grad_()
        y = native_chain(leaves["dx"], with_leaves(drawn, leaves))
        assert y.requires_grad == bool(asked)
        if asked:
            y.backward(drawn.grad)
        for name in names:
            assert (leaves[name].grad is not None) == (name in asked)
            if name in asked:
                assert_close(name, leaves[name].grad, exact.tensors[name], NATIVE_CHAIN, floor=exact.floors[name])


def saved_by(function):
    """Tensors kept for backward while function runs, and its result."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        return saved, function()


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_saves_each_convolution_output_once(dtype, plan, native):
    drawn = ChainCase((2, 24, 8, 8), "pw48 dw3s2 pw32/identity", dtype=dtype).draw_once()
    params = [stage.params for stage in drawn.stages]
    x = drawn.x.requires_grad_()
    outputs = {"stored": [48 * 64, 48 * 16, 32 * 16], "recomputed": [48 * 16, 32 * 16, 24 * 64]}[plan]
    statistics = 2 * (48 + 48 + 32) * 8
    parameters = sum(p.conv_weight.nbytes + p.bn_weight.nbytes + p.bn_bias.nbytes for p in params)

    def run():
        return native_chain(x, drawn.stages)

    saved, _ = saved_by(run)
    assert sum(t.nbytes for t in saved) == 2 * sum(outputs) * dtype.itemsize + statistics + parameters
    # the input of the chain only where backward computes the expansion from it again
    assert any(t.data_ptr() == x.data_ptr() for t in saved) == (plan == "recomputed")
    with torch.no_grad():
        assert saved_by(run)[0] == []
    x.requires_grad_(False)
    assert saved_by(run)[0] == []


def test_the_input_is_not_kept_alive(plan, native):
    drawn = ChainCase((2, 24, 8, 8), "pw48 dw3s2 pw32/identity").draw_once()
    source = torch.zeros(1, requires_grad=True)
    x = drawn.x + source
    gone = weakref.ref(x.untyped_storage())
    y = native_chain(x, drawn.stages)
    del x
    assert (gone() is None) == (plan == "stored")
    y.backward(drawn.grad)
    del y
    assert gone() is None


def test_vendor_convolutions_keep_no_input_either(native):
    # a dense 3 x 3 convolution runs in PyTorch; only BatchNorm's input is kept
    drawn = ChainCase((2, 24, 9, 7), "dense32k3s2").draw_once()
    x = drawn.x.requires_grad_()
    saved, _ = saved_by(lambda: native_chain(x, drawn.stages))
    assert not any(t.data_ptr() == x.data_ptr() for t in saved)


@pytest.mark.parametrize("units", [f"dense8k{k}s{s}" for k, s in product((3, 5), (1, 2, 3))])
def test_vendor_convolutions_match_float64_reference(units, native):
    for size in product((6, 7, 8), (5, 9, 10)):
        check_case(ChainCase((2, 6, *size), units))


def test_second_derivatives_are_refused(native):
    drawn = ChainCase((2, 6, 5, 4), "pw18 dw3 pw6/identity").draw_once()
    x = drawn.x.requires_grad_()
    refused = pytest.raises(RuntimeError, match="second derivatives are not implemented.*use backend='reference'")
    (gradient,) = torch.autograd.grad(native_chain(x, drawn.stages).square().sum(), x, create_graph=True)
    with refused:
        torch.autograd.grad(gradient.square().sum(), x)
    # as in a gradient penalty: the gradient of the sum is a constant, and nothing but x requires grad
    y = native_chain(x, drawn.stages)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with refused:
        (y.sum() + gradient.square().sum()).backward()


def test_traces_and_exports_with_dynamic_sizes_serve_other_sizes(native):
    """A plan is for one size, so neither may hold one."""
    block = FusedInvertedResidual(8, 8, kernel_size=3, stride=1, expand=3).eval().requires_grad_(False)
    small, large = torch.randn(2, 8, 6, 6), torch.randn(5, 8, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(block, small, check_trace=False)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(block, (small,), dynamic_shapes={"x": {0: batch}})
    for program in (traced, exported.module()):
        for x in (small, large):
            torch.testing.assert_close(program(x), block(x))


@pytest.mark.slow
def test_compiles_without_graph_break(plan, native):
    drawn = ChainCase((2, 6, 8, 7), "pw18/relu6 dw3/relu6 pw6/identity", "x").draw_once()
    want = run_chain(native_chain, drawn)
    for backend in ("aot_eager", "inductor"):
        if backend == "inductor" and plan == "stored":
            continue  # seconds to compile, and the graph is the same
        torch.compiler.reset()
        got = run_chain(torch.compile(native_chain, fullgraph=True, backend=backend), drawn)
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, want[name], rtol=1e-6, atol=1e-6, msg=name)


def test_checkpoint_and_inference(plan, native):
    drawn = ChainCase((2, 6, 8, 7), "pw18 dw3 pw6/identity", "x").draw_once()

    def checkpointed(x, stages, **arguments):
        return checkpoint(native_chain, x, stages, use_reentrant=False, **arguments)

    frozen = drawn._replace(stages=[stage._replace(momentum=0.0) for stage in drawn.stages])
    want, got = run_chain(native_chain, frozen), run_chain(checkpointed, frozen)
    assert all(torch.equal(got[name], want[name]) for name in want)
    with torch.inference_mode():
        assert torch.equal(native_chain(frozen.x, frozen.stages, residual=frozen.x), want["y"])


# ---- the registered operators


def forward_arguments(drawn: Drawn, *, recompute: bool = False, **changes) -> dict:
    """Arguments of torch.ops.nasfast.conv_bn_act_chain_fwd by name."""
    stages = drawn.stages
    params = [stage.params for stage in stages]
    empty = torch.empty(0)
    return {
        "x": drawn.x,
        "conv_weights": [p.conv_weight for p in params],
        "bn_weights": [p.bn_weight for p in params],
        "bn_biases": [p.bn_bias for p in params],
        "running_means": [empty if s.training else s.params.running_mean for s in stages],
        "running_vars": [empty if s.training else s.params.running_var for s in stages],
        "residual": None if drawn.residual is drawn.x else drawn.residual,
        "plan": planned_numbers(drawn, recompute=recompute),
        "eps": [stage.eps for stage in stages],
        "add_input": drawn.residual is drawn.x,
        "keep": True,
        **changes,
    }


def backward_arguments(drawn: Drawn, wants: list[bool] | None = None, *, recompute: bool = False, **changes) -> dict:
    """Arguments of torch.ops.nasfast.conv_bn_act_chain_bwd by name, after a forward with the changes it shares."""
    forward = forward_arguments(drawn, recompute=recompute)
    forward |= {name: value for name, value in changes.items() if name in forward}
    with torch.no_grad():
        _, saved, statistics = FORWARD(**forward)
    shared = ("conv_weights", "bn_weights", "bn_biases", "plan", "eps", "add_input")
    return {
        "grad": drawn.grad,
        "x": drawn.x if recompute else None,
        "saved": saved,
        "statistics": statistics,
        "batch_statistics": [stage.training for stage in drawn.stages],
        "wants": [True] * (1 + 2 * len(drawn.stages)) if wants is None else wants,
        **{name: forward[name] for name in shared},
        **changes,
    }


# None without the extension, where every test that calls them is skipped
FORWARD, BACKWARD = (getattr(torch.ops.nasfast, f"conv_bn_act_chain_{way}", None) for way in ("fwd", "bwd"))
BLOCK = ChainCase((2, 6, 5, 4), "pw18/relu6 dw3/relu6 pw6/identity")
# outputs that leave no gap in the saved tensor, whose content is undefined and so is compared with itself
OPCHECKED = [
    (ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity"), {}),
    (ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity"), {"recompute": True}),
    (ChainCase((2, 8, 4, 4), "pw16/relu6 dw3/relu6 pw8/identity"), {"recompute": True, "add_input": True}),
    (ChainCase((2, 5, 4, 4), "pw16! dw3s2! pw8!", "tensor", dtype=BFLOAT16), {}),
    (ChainCase((4, 1, 4, 4), "pw1"), {}),
    (ChainCase((2, 3, 8, 8), "dense8k3s2", x_grad=False), {}),
    (ChainCase((2, 16, 4, 4), "dw3 pw8", shuffle=True), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "changes"), OPCHECKED, ids=str)
def test_opcheck(case, changes, native):
    drawn = case.draw_once()
    arguments = forward_arguments(drawn, **changes)
    arguments["x"].requires_grad_(case.x_grad)
    for tensor in arguments["bn_weights"] + arguments["bn_biases"]:
        tensor.requires_grad_()
    # aot_dispatch compares gradients of traced and untraced calls too, with tensors of dynamic shape
    torch.library.opcheck(FORWARD.default, (), arguments)
    if not case.x_grad:
        return
    arguments = backward_arguments(drawn._replace(x=drawn.x.detach()), **changes)
    detached = {
        name: [t.detach() for t in value] if isinstance(value, list) and torch.is_tensor(value[0]) else value
        for name, value in arguments.items()
    }
    for wants in (None, [False, True, False] + [True] * (2 * len(drawn.stages) - 2)):
        torch.library.opcheck(BACKWARD.default, (), detached | ({} if wants is None else {"wants": wants}))


@pytest.mark.parametrize("channels, units, shuffle, recompute", [
    (3, "dense8k3s2 pw24/relu dw5s2 pw8", False, False),
    (16, "pw64/relu6 dw3/tanh pw8", False, True),
    (16, "pw8 dw3 pw8 dw7 pw8", True, False),
])  # fmt: skip
@pytest.mark.parametrize("training", [True, False])
def test_without_backward_nothing_is_kept_and_the_result_is_the_same(channels, units, shuffle, recompute, training):
    units = units if training else " ".join(f"{unit}!" for unit in units.split())
    drawn = ChainCase((2, channels, 17, 9), units, shuffle=shuffle, x_grad=False).draw_once()
    assert all(stage.training == training for stage in drawn.stages)
    arguments = forward_arguments(drawn, recompute=recompute)
    y, saved, statistics = FORWARD(**arguments)
    y_alone, nothing, statistics_alone = FORWARD(**arguments | {"keep": False})
    assert saved.numel() > 0 and nothing.numel() == 0
    assert torch.equal(y, y_alone) and torch.equal(statistics, statistics_alone)
    arguments["bn_weights"][-1].requires_grad_()
    with pytest.raises(RuntimeError, match="`keep` must be true"):
        FORWARD(**arguments | {"keep": False})


def test_a_trainable_convolution_is_refused_by_the_operator_and_served_by_the_function(native):
    drawn = BLOCK.draw_once()
    arguments = forward_arguments(drawn)
    arguments["conv_weights"][1].requires_grad_()
    with pytest.raises(RuntimeError, match="a convolution weight requires grad.*freeze it with requires_grad_"):
        FORWARD(**arguments)
    y = native_chain(drawn.x, drawn.stages)
    y.backward(drawn.grad)
    assert drawn.stages[1].params.conv_weight.grad is not None


def broken(**changes):
    """The block's arguments with some replaced by a function of themselves."""
    return {name: change if callable(change) else lambda _, value=change: value for name, change in changes.items()}


# places of numbers in the header of a plan, and in the part of each stage
HEADER = {"batch": 0, "channels": 1, "height": 2, "width": 3, "shuffle": 4, "saved_size": 5}
STAGE = {
    "kind": 0, "act": 1, "out_channels": 2, "kernel": 3, "stride": 4,
    "out_height": 5, "out_width": 6, "saved_at": 7, "statistics_at": 8,
}  # fmt: skip


def broken_plan(i_stage=None, **numbers):
    """The block's plan with other numbers in the header, or in stage i_stage."""
    begin = 0 if i_stage is None else len(HEADER) + i_stage * len(STAGE)
    places = {(HEADER if i_stage is None else STAGE)[name] + begin: value for name, value in numbers.items()}
    return broken(plan=lambda plan: [places.get(place, number) for place, number in enumerate(plan)])


NHWC = torch.channels_last
BAD_PLAN = {
    "no stages": broken(plan=lambda plan: plan[: len(HEADER)]),
    "no plan": broken(plan=[]),
    "a number missing": broken(plan=lambda plan: plan[:-1]),
    "two stages": broken(plan=lambda plan: plan[: -len(STAGE)]),
    "another batch": broken_plan(batch=3),
    "batch 0": broken_plan(batch=0),
    "negative batch": broken_plan(batch=-2),
    "huge batch": broken_plan(batch=2**62),
    "another height": broken_plan(height=6),
    "height 0": broken_plan(height=0),
    "negative size": broken_plan(height=-5, width=-4),
    "no channels": broken_plan(channels=0),
    "other channels": broken_plan(channels=7),
    "shuffle of another shape": broken_plan(shuffle=1),
    "too little saved": broken_plan(saved_size=100),
    "huge saved": broken_plan(saved_size=2**62),
    "unknown kind": broken_plan(0, kind=3),
    "negative kind": broken_plan(0, kind=-1),
    "another kind": broken_plan(0, kind=1),
    "pointwise instead of depthwise": broken_plan(1, kind=0),
    "dense in the middle": broken_plan(1, kind=2),
    "unknown act": broken_plan(0, act=4),
    "negative act": broken_plan(0, act=-1),
    "no output channels": broken_plan(0, out_channels=0),
    "other output channels": broken_plan(0, out_channels=17),
    "another kernel": broken_plan(1, kernel=5),
    "even kernel": broken_plan(1, kernel=2),
    "kernel too large": broken_plan(1, kernel=9),
    "kernel 0": broken_plan(1, kernel=0),
    "stride 0": broken_plan(1, stride=0),
    "stride -1": broken_plan(1, stride=-1),
    "stride 2 without its size": broken_plan(1, stride=2),
    "stride 3": broken_plan(1, stride=3, out_height=2, out_width=2),
    "pointwise stride": broken_plan(2, stride=2, out_height=3, out_width=2),
    "another output": broken_plan(1, out_height=6),
    "saved over another stage": broken_plan(1, saved_at=0),
    "saved at no vector's place": broken_plan(1, saved_at=18 * 40 + 49),
    "saved behind the end": broken_plan(2, saved_at=10**6),
    "saved nowhere": broken_plan(0, saved_at=2**62),
    "the second computed again": broken_plan(1, saved_at=-1),
    "saved before the beginning": broken_plan(0, saved_at=-2),
    "statistics over another stage": broken_plan(1, statistics_at=0),
}
BAD_FORWARD = {
    "x dtype": broken(x=lambda t: t.double()),
    "x half": broken(x=lambda t: t.half()),
    "x layout": broken(x=lambda t: t.contiguous()),
    "x strided": broken(x=lambda t: t[:, :, ::2]),
    "x expanded": broken(x=lambda t: t[:1].expand(2, -1, -1, -1)),
    "x 3-d": broken(x=lambda t: t[0]),
    "x empty": broken(x=lambda t: t[:0]),
    "x channels": broken(x=lambda t: t[:, :5].contiguous(memory_format=NHWC)),
    "x without channels": broken(x=lambda t: t[:, :0].contiguous(memory_format=NHWC)),
    "weight dtype": broken(conv_weights=lambda w: [w[0].double(), *w[1:]]),
    "weight int": broken(conv_weights=lambda w: [w[0].int(), *w[1:]]),
    "weight 2-d": broken(conv_weights=lambda w: [w[0][:, :, 0, 0], *w[1:]]),
    "weight strided": broken(conv_weights=lambda w: [w[0].mT.expand(-1, -1, 1, 1)[::2], *w[1:]]),
    "weight not square": broken(conv_weights=lambda w: [w[0], w[1][:, :, :1], w[2]]),
    "weight even": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 1, 2, 2), w[2]]),
    "weight too large": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 1, 9, 9), w[2]]),
    "weight channels": broken(conv_weights=lambda w: [w[0], w[1], w[2][:, :17].contiguous()]),
    "weight empty": broken(conv_weights=lambda w: [torch.zeros(0, 6, 1, 1), *w[1:]]),
    "dense in the middle": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 18, 3, 3), w[2]]),
    "grouped": broken(conv_weights=lambda w: [w[0], torch.zeros(18, 2, 3, 3), w[2]]),
    "short weights": broken(conv_weights=lambda w: w[:2]),
    "short bn_weights": broken(bn_weights=lambda w: w[:2]),
    "short bn_biases": broken(bn_biases=lambda w: w[:2]),
    "long bn_biases": broken(bn_biases=lambda w: w + w),
    "short running_means": broken(running_means=lambda w: w[:2]),
    "short running_vars": broken(running_vars=lambda w: w[:2]),
    "short eps": broken(eps=[1e-5]),
    "bn_weight shape": broken(bn_weights=lambda w: [w[0][:17], *w[1:]]),
    "bn_weight dtype": broken(bn_weights=lambda w: [w[0].double(), *w[1:]]),
    "bn_weight strided": broken(bn_weights=lambda w: [w[0].repeat(2)[::2], *w[1:]]),
    "bn_weight 2-d": broken(bn_weights=lambda w: [w[0][None], *w[1:]]),
    "bn_bias shape": broken(bn_biases=lambda w: [w[0], w[1][:1], w[2]]),
    "running_mean shape": broken(running_means=[torch.zeros(17), *2 * [torch.empty(0)]]),
    "running_mean dtype": broken(running_means=[torch.zeros(18).double(), *2 * [torch.empty(0)]]),
    "running_var shape": broken(running_means=[torch.zeros(18), *2 * [torch.empty(0)]]),
    "residual shape": broken(residual=torch.zeros(2, 6, 5, 5).contiguous(memory_format=NHWC)),
    "residual dtype": broken(residual=lambda _: torch.zeros(2, 6, 5, 4).double().contiguous(memory_format=NHWC)),
    "residual layout": broken(residual=torch.zeros(2, 6, 5, 4)),
    "residual 3-d": broken(residual=torch.zeros(6, 5, 4)),
    "input added to another shape": broken(add_input=True, x=lambda t: t[:, :5].contiguous(memory_format=NHWC)),
}  # fmt: skip
BAD_BACKWARD = {
    "grad shape": broken(grad=lambda g: g[:, :5].contiguous(memory_format=NHWC)),
    "grad batch": broken(grad=lambda g: g[:1]),
    "grad dtype": broken(grad=lambda g: g.double()),
    "grad layout": broken(grad=lambda g: g.contiguous()),
    "grad expanded": broken(grad=lambda g: g[:1, :1, :1, :1].expand_as(g)),
    "saved shape": broken(saved=lambda t: t[:-1]),
    "saved empty": broken(saved=lambda t: t[:0]),
    "saved strided": broken(saved=lambda t: t.repeat(2)[::2]),
    "saved type": broken(saved=lambda t: t.to(BFLOAT16)),
    "saved double": broken(saved=lambda t: t.double()),
    "statistics shape": broken(statistics=lambda t: t[:-1]),
    "statistics dtype": broken(statistics=lambda t: t.float()),
    "x without recomputation": broken(x=lambda _: torch.zeros(2, 6, 5, 4).contiguous(memory_format=NHWC)),
    "recomputation without x": broken_plan(0, saved_at=-1),
    "short wants": broken(wants=[True] * 6),
    "long wants": broken(wants=[True] * 8),
    "short batch_statistics": broken(batch_statistics=[True]),
    "weights": broken(conv_weights=lambda w: w[:2]),
    "weight channels": broken(conv_weights=lambda w: [w[0], w[1], w[2][:, :17].contiguous()]),
    "bn_weight": broken(bn_weights=lambda w: [w[0][:17], *w[1:]]),
    "eps": broken(eps=[]),
}


@pytest.mark.parametrize("changes", [*BAD_FORWARD.values(), *BAD_PLAN.values()], ids=[*BAD_FORWARD, *BAD_PLAN])
def test_bad_arguments_of_forward_are_refused(changes, native):
    arguments = forward_arguments(BLOCK.draw_once())
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
        FORWARD(**arguments)


@pytest.mark.parametrize("changes", [*BAD_BACKWARD.values(), *BAD_PLAN.values()], ids=[*BAD_BACKWARD, *BAD_PLAN])
def test_bad_arguments_of_backward_are_refused(changes, native):
    arguments = backward_arguments(BLOCK.draw_once())
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    with pytest.raises((RuntimeError, ValueError), match="conv_bn_act_chain"):
        BACKWARD(**arguments)


def test_bad_x_of_a_recomputing_backward_is_refused(native):
    good = backward_arguments(BLOCK.draw_once(), recompute=True)
    x = good["x"]
    for bad in (x.contiguous(), x[:1], x.double(), x[:, :5].contiguous(memory_format=NHWC), None):
        with pytest.raises(RuntimeError, match="conv_bn_act_chain: x "):
            BACKWARD(**good | {"x": bad})


def test_a_dense_stage_has_no_input_gradient(native):
    drawn = ChainCase((2, 3, 5, 4), "dense8k3s2").draw_once()
    with pytest.raises(RuntimeError, match="a dense stage has no input gradient"):
        BACKWARD(**backward_arguments(drawn))


@pytest.mark.parametrize("case", [ChainCase((2, 6, 5, 4), "pw4"), ChainCase((2, 6, 5, 4), "dw3s2")], ids=str)
def test_a_backward_that_adds_the_input_to_another_shape_is_refused(case, native):
    with pytest.raises(RuntimeError, match="conv_bn_act_chain: x can be added only"):
        BACKWARD(**backward_arguments(case.draw_once()) | {"add_input": True})


@pytest.mark.parametrize("name", ["conv_weights", "bn_weights", "bn_biases", "running_means", "residual"])
def test_tensors_of_another_device_are_refused(name, native):
    arguments = forward_arguments(BLOCK.draw_once(), residual=torch.zeros(2, 6, 5, 4).contiguous(memory_format=NHWC))
    given = arguments[name]
    elsewhere = [given[0].to("meta"), *given[1:]] if isinstance(given, list) else given.to("meta")
    with pytest.raises((RuntimeError, ValueError), match="device"):
        FORWARD(**arguments | {name: elsewhere})


STAGE = Stage(ConvBNParams(torch.ones(6, 4, 1, 1), torch.ones(6), torch.zeros(6)))
X = torch.ones(2, 4, 5, 5)
WRONG = {
    "no stages": (ValueError, "needs at least one stage", {"stages": []}),
    "tuple": (TypeError, r"stages\[0\]: must be a Stage, got tuple", {"stages": [tuple(STAGE)]}),
    "3-d x": (ValueError, "x must be 4-d", {"x": X[0]}),
    "int x": (TypeError, "x must be float32", {"x": X.long()}),
    "second stage": (ValueError, r"stages\[1\]: conv_weight of shape.*takes 4 channels", {"stages": [STAGE, STAGE]}),
    "act": (ValueError, r"stages\[0\]: act must be one of", {"stages": [STAGE._replace(act="gelu")]}),
    "eval": (ValueError, r"stages\[0\]: training=False", {"stages": [STAGE._replace(training=False)]}),
    "residual": (ValueError, "residual must have the shape of the result", {"residual": X}),
    "empty": (ValueError, "empty batch", {"x": X[:0]}),
    "one value": (ValueError, "single value per channel", {"x": X[:1, :, :1, :1]}),
    "odd shuffle": (ValueError, "splits an even number of channels", {"x": torch.ones(2, 3, 5, 5), "shuffle": True}),
    "shuffle": (ValueError, "keep the shape", {"x": torch.ones(2, 8, 5, 5), "shuffle": True}),
    "backend": (RuntimeError, "backend 'cuda'.*cannot serve", {"backend": "cuda"}),
    "weight type": (
        (TypeError, RuntimeError, ValueError),
        "type",
        {"stages": [STAGE._replace(params=STAGE.params._replace(conv_weight=torch.ones(6, 4, 1, 1, dtype=BFLOAT16)))]},
    ),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, change):
    with pytest.raises(error, match=message):
        ops.conv_bn_act_chain(**{"x": X, "stages": [STAGE], **change})


def test_an_empty_batch_in_eval_mode_is_empty(backend):
    running = torch.zeros(6), torch.ones(6)
    stage = Stage(ConvBNParams(*STAGE.params[:3], *running), training=False)
    assert ops.conv_bn_act_chain(X[:0], [stage], backend=backend).shape == (0, 6, 5, 5)


def test_nothing_warns(native):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_chain(native_chain, BLOCK.draw_once())
