"""The native chain of convolution, BatchNorm and activation against float64, element by element; its autograd."""

import re
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import compress, product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from kernel_cases.case import saved_by
from kernel_cases.chain import (
    ACTS,
    BFLOAT16,
    BFLOAT16_CASES,
    BIG,
    CHAINS,
    DEPTHWISE,
    PLANS,
    POINTWISE,
    ChainCase,
    ChainInputs,
    check,
    check_bfloat16,
    check_case,
    exact_chain,
    native_autocast,
    native_chain,
    run_chain,
    widened_chain,
)
from tolerances import NATIVE_CHAIN, assert_close

from nasfast.ops import ConvBNParams, Stage, reference
from nasfast.ops.chain import plan as planning
from nasfast.ops.modules import InvertedResidual

CASES = POINTWISE + DEPTHWISE + CHAINS + PLANS


EXPANSIONS = [case for case in CHAINS + PLANS if re.match(r"pw\d+\S* dw", case.units) and case.pixels < 10**4]


@contextmanager
def planned(*, recompute):
    """Every expansion is computed again, or none, whatever the thresholds say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MIN_RECOMPUTED_EXPANSION", 0)
        patch.setattr(planning, "MAX_RECOMPUTED_CHANNELS", 10**9 * recompute)
        patch.setattr(planning, "MIN_RECOMPUTED_ROWS", 1)
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
        inputs, exact = case.draw()
        want = run_chain(reference.conv_bn_act_chain, widened_chain(inputs), x_grad=case.x_grad)
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
            inputs, exact = case.draw()
        except ValueError:
            assume(False)
        check(case, inputs, exact)


# ---- bfloat16


@pytest.mark.parametrize(
    ("case", "autocast"), [*((c, True) for c in BFLOAT16_CASES[::2]), *((c, False) for c in BFLOAT16_CASES)], ids=str
)
def test_bfloat16_is_no_worse_than_eager_autocast(case, autocast, native):
    check_bfloat16(case, autocast=autocast)


@pytest.mark.parametrize("case", BFLOAT16_CASES[:2], ids=str)
def test_bfloat16_gradients_with_a_large_mean(case, plan, native):
    # the projections of BatchNorm's backward remove what all pixels share
    check_bfloat16(case, shift=20.0)


def test_autocast_computes_in_bfloat16_what_bfloat16_inputs_give(native):
    inputs = ChainCase((4, 24, 14, 14), "pw144 dw3 pw24/identity", "tensor", dtype=BFLOAT16).draw_once()
    want = run_chain(native_chain, inputs)
    got = run_chain(native_autocast, inputs)
    assert all(torch.equal(got[name], want[name]) for name in want)
    wide = (
        inputs.x.float(),
        [s._replace(params=s.params._replace(conv_weight=s.params[0].float())) for s in inputs.stages],
    )
    y = native_autocast(*wide)
    assert y.dtype == BFLOAT16
    assert torch.equal(y, native_chain(inputs.x, inputs.stages))
    # PyTorch's promotion: a float32 residual makes a float32 sum
    mixed = native_autocast(*wide, residual=wide[0])
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, y + wide[0], rtol=0, atol=0)


# ---- hostile numbers


def test_not_a_number_stays_in_its_channel(native):
    # three groups of channels: what one leaves behind in a shared row must not reach the next
    inputs = ChainCase((2, 1100, 5, 5), "dw7 dw7s2").draw_once()
    channel, group = 700, torch.arange(1100)
    inputs.x[0, channel, 2, 2] = torch.nan
    inputs.grad[1, 42, 1, 1] = torch.inf
    spoilt = (group == channel) | (group == 42)
    for name, tensor in run_chain(native_chain, inputs).items():
        rest = tensor[~spoilt] if tensor.ndim == 1 else tensor[:, ~spoilt]
        assert rest.isfinite().all(), name
    y = native_chain(inputs.x, inputs.stages)
    assert y[:, channel].isnan().all()


@pytest.mark.parametrize("act", ["identity", "tanh"])
def test_not_a_number_in_the_gradient_stays_in_its_channel(act, native):
    # a wide map has two groups of channels, the second of partial vectors; these activations let NaN through
    inputs = ChainCase((3, 40, 3, 500), f"pw40/{act} dw5/{act}").draw_once()
    inputs.grad[1, 24, 1, 1] = torch.nan
    unaffected = torch.arange(40) != 24
    affine = {name: t for name, t in run_chain(native_chain, inputs).items() if name.startswith("d") and t.ndim == 1}
    assert len(affine) == 4
    for name, tensor in affine.items():
        assert tensor[unaffected].isfinite().all() and tensor[24].isnan(), name


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_images_do_not_see_each_other_in_eval_mode(dtype, plan, native):
    inputs = ChainCase((4, 8, 9, 9), "pw24 dw3 pw8/identity", "x").draw_once()
    x = inputs.x.to(dtype)
    stages = [
        s._replace(
            training=False,
            params=s.params._replace(
                conv_weight=s.params.conv_weight.to(dtype),
                running_mean=torch.zeros_like(s.params.bn_bias),
                running_var=torch.ones_like(s.params.bn_bias),
            ),
        )
        for s in inputs.stages
    ]
    want = torch.cat([native_chain(x[i : i + 1], stages) for i in range(4)])
    x[1], x[2] = torch.nan, 1e20
    got = native_chain(x, stages)
    assert torch.equal(got[[0, 3]], want[[0, 3]])


@pytest.mark.parametrize("units", ["pw5", "dw3", "pw40 dw3 pw8"])
def test_not_a_number_spreads_as_far_as_its_sums(units, plan, native):
    inputs = ChainCase((2, 8, 5, 5), units).draw_once()
    inputs.x[0, 3, 2, 2] = torch.nan
    got, want = (f(inputs.x, inputs.stages) for f in (native_chain, reference.conv_bn_act_chain))
    assert torch.equal(got.isnan(), want.isnan())


def test_channels_that_do_not_vary_give_finite_results(plan, native):
    inputs = ChainCase((2, 8, 5, 5), "pw24 dw3 pw8/identity", "x").draw_once()
    inputs.x.fill_(3.7)
    exact = exact_chain(inputs)
    for name, tensor in run_chain(native_chain, inputs).items():
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
    inputs = ChainInputs(x, stages, None, False, torch.randn(4, 4, 16, 16))
    exact = exact_chain(inputs)
    for name, tensor in run_chain(native_chain, inputs).items():
        assert_close(name, tensor, exact.tensors[name], NATIVE_CHAIN, floor=exact.floors[name])


def test_concurrent_python_threads_give_the_serial_bits(native):
    chains = [case.draw_once() for case in BIG[:3]]
    serial = [run_chain(native_chain, chain) for chain in chains]
    with ThreadPoolExecutor(6, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for got, want in zip(threads.map(partial(run_chain, native_chain), 8 * chains), 8 * serial, strict=True):
            assert all(torch.equal(got[name], want[name]) for name in want)


# ---- autograd


@pytest.mark.parametrize("units", ["pw18 dw3 pw6/identity", "pw18! dw3! pw6/identity!"])
def test_only_wanted_gradients_exist(units, plan, native):
    inputs, exact = ChainCase((2, 6, 5, 4), units).draw()
    names = [name for name in exact.tensors if name.startswith("d")]
    for flags in product([True, False], repeat=len(names)):
        wants = list(compress(names, flags))
        got = run_chain(native_chain, inputs, wants=wants)
        for name in names:
            assert (got[name] is not None) == (name in wants)
            if name in wants:
                assert_close(name, got[name], exact.tensors[name], NATIVE_CHAIN, floor=exact.floors[name])


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_saves_each_convolution_output_once(dtype, plan, native):
    inputs = ChainCase((2, 24, 8, 8), "pw48 dw3s2 pw32/identity", dtype=dtype).draw_once()
    params = [stage.params for stage in inputs.stages]
    x = inputs.x.requires_grad_()
    outputs = {"stored": [48 * 64, 48 * 16, 32 * 16], "recomputed": [48 * 16, 32 * 16, 24 * 64]}[plan]
    statistics = 2 * (48 + 48 + 32) * 8
    parameters = sum(p.conv_weight.nbytes + p.bn_weight.nbytes + p.bn_bias.nbytes for p in params)

    def run():
        return native_chain(x, inputs.stages)

    saved, _ = saved_by(run)
    assert sum(t.nbytes for t in saved) == 2 * sum(outputs) * dtype.itemsize + statistics + parameters
    # the input of the chain only where backward computes the expansion from it again
    assert any(t.data_ptr() == x.data_ptr() for t in saved) == (plan == "recomputed")
    with torch.no_grad():
        assert saved_by(run)[0] == []
    x.requires_grad_(False)
    assert saved_by(run)[0] == []


@pytest.mark.parametrize("pixels, recomputed", [(44, False), (45, True)])
def test_an_expansion_of_few_pixels_is_stored(pixels, recomputed, native):
    inputs = ChainCase((1, 24, pixels, pixels), "pw48 dw3").draw_once()
    planned = planning.plan_chain("cpu", inputs.x, planning.stage_fields(inputs.stages))
    assert planned.recompute == recomputed


def test_the_input_is_not_kept_alive(plan, native):
    inputs = ChainCase((2, 24, 8, 8), "pw48 dw3s2 pw32/identity").draw_once()
    source = torch.zeros(1, requires_grad=True)
    x = inputs.x + source
    gone = weakref.ref(x.untyped_storage())
    y = native_chain(x, inputs.stages)
    del x
    assert (gone() is None) == (plan == "stored")
    y.backward(inputs.grad)
    del y
    assert gone() is None


def test_vendor_convolutions_keep_no_input_either(native):
    # a dense 3 x 3 convolution runs in PyTorch; only BatchNorm's input is kept
    inputs = ChainCase((2, 24, 9, 7), "dense32k3s2").draw_once()
    x = inputs.x.requires_grad_()
    saved, _ = saved_by(lambda: native_chain(x, inputs.stages))
    assert not any(t.data_ptr() == x.data_ptr() for t in saved)


@pytest.mark.parametrize("units", [f"dense8k{k}s{s}" for k, s in product((3, 5), (1, 2, 3))])
def test_vendor_convolutions_match_float64_reference(units, native):
    for size in product((6, 7, 8), (5, 9, 10)):
        check_case(ChainCase((2, 6, *size), units))


def test_traces_and_exports_with_dynamic_sizes_serve_other_sizes(native):
    """A plan is for one size, so neither may hold one."""
    block = InvertedResidual(8, 8, kernel_size=3, stride=1, expand=3, fused=True).eval().requires_grad_(False)
    small, large = torch.randn(2, 8, 6, 6), torch.randn(5, 8, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(block, small, check_trace=False)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(block, (small,), dynamic_shapes={"x": {0: batch}})
    for program in (traced, exported.module()):
        for x in (small, large):
            torch.testing.assert_close(program(x), block(x))


def test_nothing_warns(native):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_chain(native_chain, ChainCase((2, 6, 5, 4), "pw18/relu6 dw3/relu6 pw6/identity").draw_once())


def test_a_plan_has_only_stages_of_the_operator():
    grouped = planning.StageShape((8, 4, 3, 3), torch.float32, False, 1, 1, 2, "relu6")
    with pytest.raises(ValueError, match="^make_plan: the operator does not have the stage .*groups=2"):
        planning.make_plan((2, 8, 9, 9), [grouped])
