from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.bn_act import ACTS, CASES, EPS, Case, check_case, outputs_and_grads, widened
from kernel_cases.layout import with_layout
from pairs import pairwise
from tolerances import assert_close

from nasfast import ops
from nasfast.ops import reference

MODES = {"train": (False, True), "train-residual": (True, True), "eval-residual": (True, False)}


@pytest.mark.parametrize(("case", "act", "mode"), pairwise(CASES, ACTS, list(MODES)), ids=str)
def test_matches_float64_reference(case, act, mode, backend):
    check_case(case, act, *MODES[mode], backend)


def test_poison_reaches_native_allocations(native):
    # the call the launchers make for statistics and affine gradients; other results: test_pool.py
    assert torch.ops.aten.new_empty(torch.ones(8), [4], dtype=torch.float64).isnan().all()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.float32], ids=str)
def test_reference_matches_the_formula(case, training):
    tensors = widened(case.inputs("relu6", residual=True))

    def formula(x, weight, bias, residual, *, running_mean, running_var, act, training, momentum, eps):
        mean, var = running_mean, running_var
        if training:
            mean = x.mean((0, 2, 3))
            var = (x - mean.view(1, -1, 1, 1)).square().mean((0, 2, 3))
            count = x.numel() / x.shape[1]
            with torch.no_grad():
                running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
                running_var.copy_((1 - momentum) * running_var + momentum * var * count / (count - 1))
        scaled = (x - mean.view(1, -1, 1, 1)) / (var + eps).sqrt().view(1, -1, 1, 1)
        return (scaled * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)).clamp(0, 6) + residual

    got = outputs_and_grads(reference.bn_act, tensors, act="relu6", training=training)
    want = outputs_and_grads(formula, tensors, act="relu6", training=training)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_bfloat16_is_no_worse_than_eager(layout, native):
    case = Case((4, 24, 14, 14), layout, torch.bfloat16)
    tensors = case.inputs("relu6", residual=False)

    def eager(x, weight, bias, *, running_mean, running_var, act, training, momentum, eps):
        return F.relu6(F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps))

    want = outputs_and_grads(reference.bn_act, widened(tensors), act="relu6", training=True)
    ours = outputs_and_grads(lambda **kw: ops.bn_act(**kw, backend="cpu"), tensors, act="relu6", training=True)
    theirs = outputs_and_grads(eager, tensors, act="relu6", training=True)
    for name in ("y", "dx", "dweight", "dbias"):
        error, eager_error = ((result[name].double() - want[name]).norm() for result in (ours, theirs))
        assert error <= 1.01 * eager_error, name


def test_outlier_in_the_first_pixel_does_not_spoil_the_variance(native):
    # the first pixel is the first pivot of the shifted sums
    x = torch.randn(2, 3, 64, 64)
    x[0, :, 0, 0] = 1e4
    for layout in ("nhwc", "nchw"):
        running_var = torch.zeros(3)
        ops.bn_act(
            with_layout(x, layout),
            torch.ones(3),
            torch.zeros(3),
            running_mean=torch.zeros(3),
            running_var=running_var,
            momentum=1.0,
            backend="cpu",
        )
        assert_close("running_var", running_var, x.double().var((0, 2, 3)))


def test_not_a_number_propagates(backend):
    for act, layout in product(ACTS, ("nhwc", "nchw")):
        x = with_layout(torch.randn(2, 3, 4, 4), layout)
        x[0, 1, 2, 3] = torch.nan
        y = ops.bn_act(x, torch.ones(3), torch.zeros(3), act=act, backend=backend)
        assert y[:, 1].isnan().all() and not y[:, [0, 2]].isnan().any()


def test_bfloat16_rounds_not_a_number_to_itself(native):
    statistics = {"running_mean": torch.zeros(3), "running_var": torch.ones(3), "training": False, "backend": "cpu"}
    x = torch.full((1, 3, 4, 4), torch.nan).view(torch.int32).bitwise_or(0x7FFF).view(torch.float32)
    y = ops.bn_act(x.to(torch.bfloat16), torch.ones(3), torch.zeros(3), act="identity", **statistics)
    assert y.isnan().all()


@pytest.mark.parametrize("wanted", list(product([True, False], repeat=4)), ids=str)
def test_only_wanted_gradients_exist(wanted, backend):
    names = ("x", "weight", "bias", "residual")
    tensors = Case((2, 5, 4, 4)).inputs("relu6", residual=True)
    want = outputs_and_grads(reference.bn_act, widened(tensors), act="relu6", training=True, tracked=False)
    leaves = {name: tensors[name].clone().requires_grad_(ask) for name, ask in zip(names, wanted, strict=True)}
    y = ops.bn_act(**leaves, act="relu6", eps=EPS, backend=backend)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.backward(tensors["grad"])
    for name, ask in zip(names, wanted, strict=True):
        assert (leaves[name].grad is not None) == ask
        if ask:
            assert_close(f"d{name}", leaves[name].grad, want[f"d{name}"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saves_x_and_two_numbers_per_channel(dtype, native):
    x = torch.randn(2, 24, 8, 8, dtype=dtype, requires_grad=True)
    weight, bias = torch.ones(24, requires_grad=True), torch.zeros(24, requires_grad=True)
    saved = []

    def run(**settings):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes), lambda t: t):
            ops.bn_act(x, weight, bias, residual=x.detach(), backend="cpu", **settings)
        return sum(saved)

    per_channel = weight.nbytes + bias.nbytes
    assert run() == x.nbytes + per_channel + 2 * 24 * 8
    with torch.no_grad():
        assert run() == 0
    for tensor in (x, weight, bias):
        tensor.requires_grad_(False)
    assert run() == 0


def test_opcheck(native):
    for layout, dtype, residual in product(("nhwc", "nchw"), (torch.float32, torch.bfloat16), (False, True)):
        tensors = Case((2, 5, 4, 3), layout, dtype).inputs("relu6", residual=residual)
        x, weight, bias = (tensors[name].requires_grad_() for name in ("x", "weight", "bias"))
        extra = tensors["residual"].requires_grad_() if residual else None
        for running in ((None, None), (tensors["running_mean"], tensors["running_var"])):
            torch.library.opcheck(
                torch.ops.nasfast.bn_act_fwd.default, (x, weight, bias, extra, *running, EPS, "relu6")
            )
    mean, var = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    for wanted in product([True, False], repeat=3):
        arguments = (x.detach(), x.detach(), weight.detach(), bias.detach(), mean, var, EPS, "tanh", True, *wanted)
        torch.library.opcheck(torch.ops.nasfast.bn_act_bwd.default, arguments)


def test_second_derivatives_are_refused_by_the_native_backend_only(backend):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    y = ops.bn_act(x, torch.ones(3), torch.zeros(3), act="tanh", backend=backend)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    if backend == "reference":
        assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()
    else:
        with pytest.raises(RuntimeError, match="second derivatives are not implemented in the native bn_act: use"):
            torch.autograd.grad(gradient.square().sum(), x)


@pytest.mark.parametrize("act", ACTS)
def test_reference_gradcheck(act):
    tensors = widened(Case((2, 3, 3, 2)).inputs(act, residual=True))
    leaves = [tensors[name].requires_grad_() for name in ("x", "weight", "bias", "residual")]
    assert torch.autograd.gradcheck(
        lambda x, weight, bias, residual: reference.bn_act(x, weight, bias, residual=residual, act=act), leaves
    )


def run_bits(case, act="relu6"):
    tensors = case.inputs(act, residual=True)
    return outputs_and_grads(lambda **kw: ops.bn_act(**kw, backend="cpu"), tensors, act=act, training=True)


@pytest.mark.parametrize("case", [Case((8, 24, 40, 40), layout) for layout in ("nhwc", "nchw")], ids=str)
def test_bitwise_equal_for_every_thread_count(case, native):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run_bits(case)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, tensor in run_bits(case).items():
                assert torch.equal(tensor, single[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


def test_compiles_without_graph_break(native):
    def step(x, weight, bias, mean, var):
        return ops.bn_act(x, weight, bias, running_mean=mean, running_var=var) * 2

    tensors = Case((2, 5, 4, 3)).inputs("relu6", residual=False)
    leaves = [tensors[name].requires_grad_() for name in ("x", "weight", "bias")]
    buffers, compiled_buffers = ([tensors[n].clone() for n in ("running_mean", "running_var")] for _ in range(2))
    want = step(*leaves, *buffers)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves, *compiled_buffers)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(compiled_buffers, buffers)
    grads = torch.autograd.grad(want, leaves, tensors["grad"]), torch.autograd.grad(got, leaves, tensors["grad"])
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_autocast_checkpoint_and_inference(backend):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(2, 5, 4, 4, requires_grad=True)
    weight, bias = torch.ones(5, requires_grad=True), torch.zeros(5, requires_grad=True)

    def run(x):
        return ops.bn_act(x, weight, bias, backend=backend)

    want = torch.autograd.grad(run(x).square().sum(), (x, weight, bias))
    got = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).square().sum(), (x, weight, bias))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x.to(torch.bfloat16)).dtype == torch.bfloat16
        assert run(x).dtype == torch.float32
    with torch.inference_mode():
        torch.testing.assert_close(run(x), run(x.detach()), rtol=0, atol=0)


def test_residual_of_another_type_promotes(backend):
    x = torch.randn(2, 5, 4, 4).to(torch.bfloat16)
    residual = torch.randn(2, 5, 4, 4)
    y = ops.bn_act(x, torch.ones(5), torch.zeros(5), residual=residual, backend=backend)
    want = reference.bn_act(x.double(), torch.ones(5).double(), torch.zeros(5).double(), residual=residual.double())
    assert y.dtype == torch.float32
    # the native kernel rounds its own result to bfloat16 before PyTorch adds
    assert (y - want).abs().max() <= 6 * 2**-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_reference_serves_the_other_types(dtype):
    tensors = Case((2, 5, 4, 4), dtype=dtype).inputs("relu6", residual=True)
    got = outputs_and_grads(ops.bn_act, tensors, act="relu6", training=True)
    want = outputs_and_grads(reference.bn_act, widened(tensors), act="relu6", training=True)
    for name, tensor in got.items():
        assert_close(name, tensor, want[name])


X, ONES, ZEROS = torch.ones(2, 3, 4, 4), torch.ones(3), torch.zeros(3)
WRONG = {
    "3-d x": (ValueError, r"bn_act: x must be 4-d \(N, C, H, W\), got shape \(3, 4, 4\)", {"x": X[0]}),
    "no tensor": (TypeError, "bn_act: x must be a tensor, got NoneType", {"x": None}),
    "no bias": (TypeError, "bn_act: bias must be a tensor, got NoneType", {"bias": None}),
    "int x": (TypeError, "bn_act: x must be float32, bfloat16.*got torch.int64", {"x": X.long()}),
    "weight shape": (ValueError, r"bn_act: weight must have shape \(3,\), got \(2,\)", {"weight": ONES[:2]}),
    "bias type": (TypeError, "bn_act: bias must be float32.*got torch.bfloat16", {"bias": ZEROS.bfloat16()}),
    "weight device": (ValueError, "weight must be on cpu like x, got meta", {"weight": ONES.to("meta")}),
    "act": (ValueError, "act must be one of identity, relu, relu6, tanh, hswish, silu, got 'gelu'", {"act": "gelu"}),
    "eps": (ValueError, "eps must be positive, got 0", {"eps": 0}),
    "one running": (ValueError, "running_var is None", {"running_mean": ZEROS}),
    "running shape": (ValueError, "running_mean must have shape", {"running_mean": ZEROS[:1], "running_var": ONES}),
    "eval": (ValueError, "training=False normalises with running statistics, but", {"training": False}),
    "residual shape": (ValueError, "residual must have the shape of the result", {"residual": X[:1]}),
    "residual device": (ValueError, "residual must be on cpu", {"residual": X.to("meta")}),
    "empty": (ValueError, "cannot take batch statistics of an empty batch", {"x": X[:0]}),
    "one value": (ValueError, "single value per channel.*variance is always 0", {"x": X[:1, :, :1, :1]}),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, change):
    with pytest.raises(error, match=message):
        ops.bn_act(**{"x": X, "weight": ONES, "bias": ZEROS, **change})


def test_empty_batch_in_eval_mode_is_empty(backend):
    y = ops.bn_act(X[:0], ONES, ZEROS, running_mean=ZEROS, running_var=ONES, training=False, backend=backend)
    assert y.shape == (0, 3, 4, 4)
