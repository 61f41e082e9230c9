from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.mixed_bn import CASES, EPS, MixedCase, check_case, outputs_and_grads, widened
from tolerances import TOLERANCES, assert_close

from nasfast import ops
from nasfast.ops import reference


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64_reference(case, backend):
    check_case(case, backend)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.float32], ids=str)
def test_reference_matches_the_formula(case):
    def formula(xs, gates, *, normalize, eps):
        y = 0
        for k, x in enumerate(xs):
            mean = x.mean((0, 2, 3), keepdim=True)
            var = (x - mean).square().mean((0, 2, 3), keepdim=True)
            y = y + gates[k] * ((x - mean) / (var + eps).sqrt() if normalize[k] else x)
        return y

    drawn = widened(*case.draw())
    got = outputs_and_grads(reference.mixed_bn, *drawn, case.normalize)
    want = outputs_and_grads(formula, *drawn, case.normalize)
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-8, atol=1e-8, msg=name)


def test_gradients_are_those_of_the_spelled_out_formulas():
    case = MixedCase((2, 6, 5, 3), "nxn")
    xs, gates, grad = widened(*case.draw())
    got = outputs_and_grads(reference.mixed_bn, xs, gates, grad, case.normalize)
    for k, x in enumerate(xs):
        xhat, rstd, center = x, 1, 0
        if case.normalize[k]:
            rstd = (x.var((0, 2, 3), correction=0, keepdim=True) + EPS).rsqrt()
            xhat = (x - x.mean((0, 2, 3), keepdim=True)) * rstd
            center = grad.mean((0, 2, 3), keepdim=True) + xhat * (grad * xhat).mean((0, 2, 3), keepdim=True)
        torch.testing.assert_close(got["dgates"][k], (grad * xhat).sum())
        torch.testing.assert_close(got[f"dx{k}"], gates[k] * rstd * (grad - center))


def test_a_tensor_given_twice_gets_both_gradients(backend):
    (x, other), _, grad = MixedCase((2, 6, 5, 4), "nn").draw()
    gates = torch.tensor([0.5, -2.0, 3.0])
    flags = [True, True, False]

    def run(function, *tensors):
        x, other, gates, grad = (t.detach() for t in tensors)
        leaves = [t.requires_grad_() for t in (x, other, gates)]
        y = function([x, other, x], gates, normalize=flags)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    want = run(reference.mixed_bn, *(t.double() for t in (x, other, gates, grad)))
    got = run(partial(ops.mixed_bn, backend=backend), x, other, gates, grad)
    for i, tensor in enumerate(got):
        assert_close(str(i), tensor, want[i], floor=10.0)


def test_bfloat16_is_no_worse_than_eager(native):
    case = MixedCase((4, 24, 14, 14), "nnxnn", dtype=torch.bfloat16)

    def eager(xs, gates, *, normalize, eps):
        terms = [
            F.batch_norm(x, None, None, None, None, True, 0, eps) if n else x
            for x, n in zip(xs, normalize, strict=True)
        ]
        return sum(gate.to(x.dtype) * x for gate, x in zip(gates, terms, strict=True))

    drawn = case.draw()
    want = outputs_and_grads(reference.mixed_bn, *widened(*drawn), case.normalize)
    ours = outputs_and_grads(partial(ops.mixed_bn, backend="cpu"), *drawn, case.normalize)
    theirs = outputs_and_grads(eager, *drawn, case.normalize)
    for name in want:
        error, eager_error = (
            float((result[name].detach().double() - want[name].detach()).norm()) for result in (ours, theirs)
        )
        assert error <= 1.01 * eager_error, name


def test_not_a_number_propagates_within_its_channel(backend):
    x = torch.randn(2, 6, 4, 4).contiguous(memory_format=torch.channels_last)
    x[0, 1, 2, 3] = torch.nan
    others = torch.randn(2, 2, 6, 4, 4).unbind()
    y = ops.mixed_bn([others[0], x, others[1]], torch.ones(3), normalize=[True] * 3, backend=backend)
    assert y[:, 1].isnan().all() and not y[:, [0, 2, 3, 4, 5]].isnan().any()


@pytest.mark.parametrize("wanted", list(product([True, False], repeat=4)), ids=str)
def test_only_wanted_gradients_exist(wanted, backend):
    case = MixedCase((2, 6, 5, 4), "nxn")
    xs, gates, grad = case.draw()
    want = outputs_and_grads(reference.mixed_bn, *widened(xs, gates, grad), case.normalize)
    leaves = {f"dx{k}": x for k, x in enumerate(xs)} | {"dgates": gates}
    for leaf, ask in zip(leaves.values(), wanted, strict=True):
        leaf.requires_grad_(ask)
    y = ops.mixed_bn(xs, gates, normalize=case.normalize, eps=EPS, backend=backend)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.backward(grad)
    for (name, leaf), ask in zip(leaves.items(), wanted, strict=True):
        assert (leaf.grad is not None) == ask
        if ask:
            assert_close(name, leaf.grad, want[name], floor=10.0)


@pytest.mark.parametrize("asked", list(product([True, False], repeat=2)), ids=str)
def test_operator_leaves_empty_what_is_not_wanted(asked, native):
    want_x, want_gates = asked
    xs, gates, grad = MixedCase((2, 6, 5, 4), "nx").draw()
    statistics = torch.ops.nasfast.mixed_bn_fwd(xs, gates, [True, False], EPS)[1]
    dxs, dgates = torch.ops.nasfast.mixed_bn_bwd(
        grad, xs, gates, statistics, [True, False], EPS, [want_x, want_x, want_gates]
    )
    assert [dx.numel() for dx in dxs] == [xs[0].numel() * want_x] * 2
    assert dgates.numel() == 2 * want_gates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saves_the_inputs_and_two_numbers_per_channel(dtype, native):
    xs = [x.requires_grad_() for x in MixedCase((2, 24, 8, 8), "nxn", dtype=dtype).draw()[0]]
    gates = torch.ones(3, requires_grad=True)
    saved = []

    def run():
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            ops.mixed_bn(xs, gates, normalize=[True, False, True], backend="cpu")
        return sum(t.nbytes for t in saved)

    assert run() == 3 * xs[0].nbytes + gates.nbytes + 2 * 2 * 24 * 8
    assert {x.data_ptr() for x in xs} <= {t.data_ptr() for t in saved}
    with torch.no_grad():
        assert run() == 0
    for tensor in (*xs, gates):
        tensor.requires_grad_(False)
    assert run() == 0


def test_opcheck(native):
    for layout, dtype in product(("nhwc", "nchw"), (torch.float32, torch.bfloat16)):
        xs, gates, grad = MixedCase((2, 6, 4, 3), "nxn", dtype=dtype).draw()
        if layout == "nchw":  # one channel is both
            xs, grad = [x[:, :1].contiguous() for x in xs], grad[:, :1].contiguous()
        flags = [True, False, True]
        leaves = [x.detach().requires_grad_() for x in xs]
        torch.library.opcheck(
            torch.ops.nasfast.mixed_bn_fwd.default, (leaves, gates.clone().requires_grad_(), flags, EPS)
        )
        statistics = torch.ops.nasfast.mixed_bn_fwd(xs, gates, flags, EPS)[1]
        for wants in ([True] * 4, [False, True, False, False], [False, False, False, True]):
            arguments = (grad, xs, gates, statistics, flags, EPS, wants)
            torch.library.opcheck(torch.ops.nasfast.mixed_bn_bwd.default, arguments)


def test_operator_refuses_what_would_corrupt_memory(native):
    xs, gates, grad = MixedCase((2, 6, 4, 3), "nn").draw()
    forward, backward = torch.ops.nasfast.mixed_bn_fwd, torch.ops.nasfast.mixed_bn_bwd
    statistics = forward(xs, gates, [True, True], EPS)[1]
    for wrong in (
        lambda: forward([], gates[:0], [], EPS),
        lambda: forward([x.contiguous() for x in xs], gates, [True, True], EPS),
        lambda: forward([xs[0], xs[1][:1]], gates, [True, True], EPS),
        lambda: forward([xs[0], xs[1].bfloat16()], gates, [True, True], EPS),
        lambda: forward(xs, gates[:1], [True, True], EPS),
        lambda: forward(xs, gates.double(), [True, True], EPS),
        lambda: forward(xs, gates, [True], EPS),
        lambda: backward(grad.contiguous(), xs, gates, statistics, [True, True], EPS, [True] * 3),
        lambda: backward(grad, xs, gates, statistics[1:], [True, True], EPS, [True] * 3),
        lambda: backward(grad, xs, gates, statistics, [True, True], EPS, [True] * 2),
    ):
        with pytest.raises(RuntimeError, match="mixed_bn"):
            wrong()


def test_second_derivatives_are_refused_by_the_native_backend_only(backend):
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    gates = torch.tensor([0.7], requires_grad=True)
    y = ops.mixed_bn([x], gates, normalize=[True], backend=backend)
    gradients = torch.autograd.grad(y.pow(3).sum(), (x, gates), create_graph=True)
    for gradient in gradients:
        if backend == "reference":
            assert torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)[0].isfinite().all()
        else:
            with pytest.raises(
                RuntimeError, match="second derivatives are not implemented in the native mixed_bn: use"
            ):
                torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)


def test_reference_gradcheck():
    xs = torch.randn(3, 2, 3, 2, 2, dtype=torch.float64).unbind()
    gates = torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (*xs, gates)]

    def run(*tensors):
        return reference.mixed_bn(tensors[:-1], tensors[-1], normalize=[True, True, False])

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("case", [MixedCase((8, 6, 61, 60), "nxn"), MixedCase((4, 16, 64, 64), "nnnnn")], ids=str)
def test_bitwise_equal_for_every_thread_count(case, native):
    def run():
        return outputs_and_grads(partial(ops.mixed_bn, backend="cpu"), *case.draw(), case.normalize)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = run()
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for name, tensor in run().items():
                assert torch.equal(tensor, single[name]), (name, count)
    finally:
        torch.set_num_threads(threads)


def test_gradients_too_large_for_the_cache_are_the_same(native):
    """Results of 8 MiB and more are written past it."""
    case = MixedCase((8, 16, 64, 64), "nnnnn")
    xs, gates, grad = case.draw()
    many = outputs_and_grads(partial(ops.mixed_bn, backend="cpu"), xs, gates, grad, case.normalize)
    one = outputs_and_grads(partial(ops.mixed_bn, backend="cpu"), xs[2:3], gates[2:3], grad, [True])
    assert sum(x.nbytes for x in xs) > 8 << 20 > xs[0].nbytes
    assert torch.equal(many["dx2"], one["dx0"])


def test_compiles_without_graph_break(native):
    def step(gates, *xs):
        return ops.mixed_bn(xs, gates, normalize=[True, False, True]) * 2

    xs, gates, grad = MixedCase((2, 6, 4, 3), "nxn").draw()
    leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (gates, *xs)]
    want = step(*leaves)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(want, leaves, grad), torch.autograd.grad(got, leaves, grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_autocast_checkpoint_and_inference(backend):
    from torch.utils.checkpoint import checkpoint

    xs = [torch.randn(2, 5, 4, 4, requires_grad=True) for _ in range(2)]
    gates = torch.randn(2, requires_grad=True)

    def run(*xs):
        return ops.mixed_bn(xs, gates, normalize=[True, False], backend=backend)

    want = torch.autograd.grad(run(*xs).square().sum(), (*xs, gates))
    got = torch.autograd.grad(checkpoint(run, *xs, use_reentrant=False).square().sum(), (*xs, gates))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(*(x.to(torch.bfloat16) for x in xs)).dtype == torch.bfloat16
        assert run(*xs).dtype == torch.float32
    with torch.inference_mode():
        torch.testing.assert_close(run(*xs), run(*(x.detach() for x in xs)), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_reference_serves_the_other_types(dtype):
    case = MixedCase((2, 5, 4, 4), "nxn", dtype=dtype)
    xs, gates, grad = case.draw()
    gates = gates.double() if dtype == torch.float64 else gates
    got = outputs_and_grads(ops.mixed_bn, xs, gates, grad, case.normalize)
    want = outputs_and_grads(reference.mixed_bn, *widened(xs, gates, grad), case.normalize)
    for name, tensor in got.items():
        assert_close(name, tensor, want[name], TOLERANCES[dtype], floor=10.0 if name == "dgates" else 0.0)


def test_empty_batch_without_statistics_is_empty(backend):
    xs = [torch.ones(0, 3, 4, 4, requires_grad=True) for _ in range(2)]
    gates = torch.ones(2, requires_grad=True)
    y = ops.mixed_bn(xs, gates, normalize=[False, False], backend=backend)
    assert y.shape == (0, 3, 4, 4)
    y.sum().backward()
    assert xs[0].grad.shape == (0, 3, 4, 4) and torch.equal(gates.grad, torch.zeros(2))


X, GATES = torch.ones(2, 3, 4, 4), torch.ones(2)
WRONG = {
    "one tensor": (TypeError, "mixed_bn: xs must be a list of tensors, got one tensor", {"xs": X}),
    "no tensor": (ValueError, "mixed_bn: needs at least one tensor, got none", {"xs": []}),
    "not a tensor": (TypeError, r"xs\[1\] must be a tensor, got int", {"xs": [X, 3]}),
    "3-d": (ValueError, r"xs\[0\] must be 4-d \(N, C, H, W\), got shape \(3, 4, 4\)", {"xs": [X[0], X[0]]}),
    "int": (TypeError, r"xs\[0\] must be float32, bfloat16.*got torch.int64", {"xs": [X.long()] * 2}),
    "shape": (ValueError, r"xs\[1\] must have the shape of xs\[0\], \(2, 3, 4, 4\), got \(1, 3", {"xs": [X, X[:1]]}),
    "type": (
        TypeError,
        r"xs\[1\] must have the type of xs\[0\], torch.float32, got torch.bf",
        {"xs": [X, X.bfloat16()]},
    ),
    "device": (ValueError, r"xs\[1\] must be on cpu like xs\[0\], got meta", {"xs": [X, X.to("meta")]}),
    "flags": (ValueError, "normalize must be one flag per tensor, 2, got 1", {"normalize": [True]}),
    "gates shape": (ValueError, r"gates must be one per tensor, shape \(2,\), got \(3,\)", {"gates": torch.ones(3)}),
    "gates type": (TypeError, "gates must be float32.*got torch.bfloat16; convert", {"gates": GATES.bfloat16()}),
    "gates device": (ValueError, "gates must be on cpu like", {"gates": GATES.to("meta")}),
    "eps": (ValueError, "eps must be positive, got 0", {"eps": 0}),
    "empty": (ValueError, "cannot take batch statistics of an empty batch", {"xs": [X[:0]] * 2}),
    "one value": (ValueError, "a single value per channel.*larger batch", {"xs": [X[:1, :, :1, :1]] * 2}),
}


@pytest.mark.parametrize(("error", "message", "change"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, change):
    arguments = {"xs": [X, X], "gates": GATES, "normalize": [True, False], **change}
    with pytest.raises(error, match=message):
        ops.mixed_bn(arguments.pop("xs"), arguments.pop("gates"), **arguments)
