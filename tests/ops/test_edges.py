"""Every operator at the edges of its inputs, against plain PyTorch: a table of operators x edges."""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import IMAGE_OPERATORS
from torch import Tensor
from torch.autograd.functional import jacobian

from nasfast import ops
from nasfast.ops import reference
from nasfast.ops.reference import ConvBNParams, Stage

C = 5  # channels of x: a vector that is not full


class Operator(NamedTuple):
    """A row of the table.

    Attributes:
        call: call(module, x, *learned) runs it on `nasfast.ops` or `nasfast.ops.reference`.
        learned: shapes of the tensors that may have gradients, beside x.
        batch: whether it takes the statistics of the batch, so that one value spreads to all, and an empty batch is
            refused.
    """

    call: Callable[..., Tensor]
    learned: tuple[tuple[int, ...], ...]
    batch: bool = False


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector(channels: int, seed: int) -> Tensor:
    return torch.rand(channels, generator=torch.Generator().manual_seed(seed)) + 0.5


def norm(act: str, training: bool) -> dict[str, Any]:
    running = {} if training else {"running_mean": vector(C, 1) - 1, "running_var": vector(C, 2)}
    return {"act": act, "training": training, **running}


def bn_act(act: str, training: bool) -> Operator:
    arguments = norm(act, training)

    def call(module, x, weight, bias):
        return module.bn_act(x, weight, bias, **arguments)

    return Operator(call, ((C,), (C,)), training)


def residual(training: bool) -> Operator:
    arguments = norm("relu", training)

    def call(module, x, weight, bias):
        return module.bn_act(x, weight, bias, residual=x, **arguments)

    return Operator(call, ((C,), (C,)), training)


def chain(text: str, act: str, training: bool, *, added: bool = False, shuffle: bool = False) -> Operator:
    """text: for each stage the kernel, `d` for depthwise, and the output channels."""
    stages: list[Stage] = []
    channels = 4 if shuffle else C
    for word in text.split():
        kernel, out = int(word[0]), int(word[2:])
        groups = out if word[1] == "d" else 1
        weight = draw(out, channels // groups, kernel, kernel, seed=3)
        running = (None, None) if training else (vector(out, 4) - 1, vector(out, 5))
        params = ConvBNParams(weight, weight, weight, *running)
        stages.append(Stage(params, 1, kernel // 2, groups, act, training))
        channels = out

    def call(module, x, *learned):
        x = torch.cat((x, x[:, :3]), 1) if shuffle else x
        learning = [
            stage._replace(params=stage.params._replace(bn_weight=weight, bn_bias=bias))
            for stage, weight, bias in zip(stages, learned[::2], learned[1::2], strict=True)
        ]
        return module.conv_bn_act_chain(x, learning, residual=x if added else None, shuffle=shuffle)

    shapes = [(len(stage.params.conv_weight),) for stage in stages]
    return Operator(call, tuple(shape for shape in shapes for _ in range(2)), training)


def depthwise_conv2d(module, x, weight):
    return module.depthwise_conv2d(x, weight, stride=2)


def mixed_bn(normalize: tuple[bool, bool]) -> Operator:
    def call(module, x, gates):
        return module.mixed_bn([x, 2 * x.flip(0)], gates, normalize=normalize)

    return Operator(call, ((2,),), any(normalize))


def squeeze_excite(gate: str) -> Operator:
    def call(module, x, *weights):
        return module.squeeze_excite(x, *weights, gate=gate)

    return Operator(call, ((3, C, 1, 1), (3,), (C, 3, 1, 1), (C,)))


MODES = {"train": True, "eval": False}
OPERATORS = {f"bn_act {act} {mode}": bn_act(act, MODES[mode]) for act in reference.ACTIVATIONS for mode in MODES}
OPERATORS |= {f"bn_act residual {mode}": residual(MODES[mode]) for mode in MODES}
for act in ("identity", "relu", "relu6", "hswish"):
    for mode, training in MODES.items():
        OPERATORS |= {
            f"pointwise {act} {mode}": chain("1-7", act, training),
            f"depthwise {act} {mode}": chain(f"3d{C}", act, training),
            f"inverted residual {act} {mode}": chain(f"1-18 3d18 1-{C}", act, training, added=True),
        }
for mode, training in MODES.items():
    OPERATORS |= {
        f"dense on patches {mode}": chain("3-6", "relu", training),
        f"dense of PyTorch {mode}": chain("5-6", "relu", training),
        f"shuffle {mode}": chain("1-4 3d4 1-4", "relu", training, shuffle=True),
    }
OPERATORS |= {
    "depthwise_conv2d": Operator(depthwise_conv2d, ((C, 1, 3, 3),)),
    "pool_3x3 max": Operator(lambda module, x: module.pool_3x3(x, kind="max"), ()),
    "pool_3x3 avg": Operator(lambda module, x: module.pool_3x3(x, kind="avg", stride=2), ()),
    "mixed_bn train": mixed_bn((True, False)),
    "mixed_bn plain": mixed_bn((False, False)),
    "squeeze_excite hsigmoid": squeeze_excite("hsigmoid"),
    "squeeze_excite sigmoid": squeeze_excite("sigmoid"),
}


def test_every_operator_of_images_is_in_the_table():
    assert {name.split()[0] for name in OPERATORS} >= set(IMAGE_OPERATORS)


def test_meta_tensors_give_shapes():
    """PyTorch has no autocast for them, and raises if it is asked."""
    x, filters, norm = (torch.empty(shape, device="meta") for shape in ((2, C, 6, 5), (C, 1, 3, 3), (C,)))
    stage = Stage(ConvBNParams(filters, norm, norm), 1, 1, C, "relu")
    assert ops.depthwise_conv2d(x, filters).shape == ops.conv_bn_act_chain(x, [stage]).shape == x.shape
    for call in (lambda: ops.qr(norm.bfloat16()[:, None]), lambda: ops.conv_bn_act_chain(x.bfloat16(), [stage])):
        with pytest.raises(TypeError, match="convert"):
            call()


def with_values(*values: float) -> Callable[[], Tensor]:
    """An x with each of these values once, in different images and channels."""

    def make():
        x = draw(3, C, 6, 7)
        for i, value in enumerate(values):
            x[i % 3, (2 * i + 1) % C, i + 1, 2 * i + 1] = value
        return x

    return make


INF, NAN = float("inf"), float("nan")
INPUTS: dict[str, Callable[[], Tensor]] = {
    "nan": with_values(NAN),
    "inf": with_values(INF),
    "minus inf": with_values(-INF),
    "nan and both infs": with_values(INF, NAN, -INF),
    "contiguous": lambda: draw(3, C, 6, 7),
    "one image": lambda: draw(1, C, 6, 7),
    "one pixel": lambda: draw(4, C, 1, 1),
    "one row": lambda: draw(2, C, 1, 9),
    "many images": lambda: draw(301, C, 1, 2),
    "batch expanded": lambda: draw(1, C, 6, 7).expand(3, C, 6, 7),
    "channels expanded": lambda: draw(3, 1, 6, 7).expand(3, C, 6, 7),
    "one value per image expanded": lambda: draw(3, 1, 1, 1).expand(3, C, 6, 7),
    "overlapping": lambda: draw(400).as_strided((3, C, 6, 7), (31, 11, 7, 1)),
    "transposed": lambda: draw(3, C, 7, 6).transpose(2, 3),
    "reversed dimensions": lambda: draw(7, 6, C, 3).permute(3, 2, 1, 0),
    "part of the channels": lambda: draw(3, C + 4, 6, 7).to(memory_format=torch.channels_last)[:, 2 : C + 2],
    "every second pixel": lambda: draw(3, C, 12, 14)[:, :, ::2, ::2],
    "unaligned": lambda: draw(3 * C * 42 + 1)[1:].view(3, C, 6, 7),
}


def results(operator: Operator, module: Any, x: Tensor, wants: tuple[bool, ...] = (), change=lambda grad: grad):
    """The result, and the gradients of what is wanted (default: all) for a gradient that `change` has changed."""
    learned = [draw(*shape, seed=10 + i) for i, shape in enumerate(operator.learned)]
    leaves = [x.detach(), *learned]
    wants = wants or (True,) * len(leaves)
    for leaf, want in zip(leaves, wants, strict=True):
        leaf.requires_grad_(want)
    y = operator.call(module, *leaves)
    grad = change(draw(*y.shape, seed=99))
    return [y, *torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], grad)]


def assert_equal(got: list[Tensor], want: list[Tensor], edge: str = "") -> None:
    """Equal but for rounding, with NaN and infinity where the other has them."""
    # sums that cancel keep the error of their terms
    scale = max([1.0, *[float(t.detach().nan_to_num(0, 0, 0).abs().max()) for t in want if t.numel()]])
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(
            mine,
            theirs,
            rtol=1e-4,
            atol=3e-5 * scale,
            equal_nan=True,
            msg=lambda text, i=i: f"{edge}, result {i}: {text}",
        )


@pytest.mark.parametrize("name", OPERATORS)
def test_inputs(native, name):
    operator = OPERATORS[name]
    learned = [draw(*shape, seed=10 + i) for i, shape in enumerate(operator.learned)]
    for edge, make in INPUTS.items():
        operand = make()
        # at a NaN, PyTorch's vectors and its last elements give different gradients of these two
        last = 1 if not operand.isfinite().all() and ("relu6" in name or "hswish" in name) else None
        # other strides are the edge
        for x in [operand, operand.to(memory_format=torch.channels_last)] if operand.is_contiguous() else [operand]:
            got, want = results(operator, ops, x), results(operator, reference, x)
            assert_equal(got[:last], want[:last], edge)
            with torch.no_grad():
                assert_equal([operator.call(ops, x, *learned)], want[:1], f"{edge}, without gradients")


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan": lambda grad: grad.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(NAN)),
    "inf": lambda grad: grad.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(INF)),
    "expanded": lambda grad: grad[:1, :1, :1, :1].expand_as(grad),
    "channels expanded": lambda grad: grad[:, :1].expand_as(grad),
    "transposed": lambda grad: grad.transpose(2, 3).contiguous().transpose(2, 3),
    "part of the channels": lambda grad: torch.cat((grad, grad), 1).to(memory_format=torch.channels_last)[
        :, 1 : 1 + grad.shape[1]
    ],
    "every second pixel": lambda grad: grad.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients(native, name):
    operator, x = OPERATORS[name], draw(3, C, 6, 7).to(memory_format=torch.channels_last)
    for edge, change in GRADIENTS.items():
        assert_equal(results(operator, ops, x, (), change), results(operator, reference, x, (), change), edge)


@pytest.mark.parametrize("name", OPERATORS)
def test_only_some_have_gradients(native, name):
    operator, x = OPERATORS[name], draw(3, C, 6, 7)
    count = 1 + len(operator.learned)
    for i in range(count):
        for wants in ([j == i for j in range(count)], [j != i for j in range(count)]):
            if any(wants):
                got, want = (results(operator, module, x, tuple(wants)) for module in (ops, reference))
                assert_equal(got, want)


EMPTY = {
    "no images": (0, C, 6, 7),
    "no images, one pixel": (0, C, 1, 1),
    "no rows": (2, C, 0, 7),
    "no pixels": (2, C, 0, 0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_empty(native, name):
    operator = OPERATORS[name]
    for (edge, shape), layout in product(EMPTY.items(), (torch.contiguous_format, torch.channels_last)):
        x = torch.zeros(shape).to(memory_format=layout)
        if operator.batch:
            with pytest.raises(ValueError, match=r"empty batch|does not fit|channels and pixels"):
                results(operator, ops, x)
            continue
        try:
            want = results(operator, reference, x)
        except RuntimeError:  # PyTorch refuses it
            with pytest.raises((RuntimeError, ValueError)):
                results(operator, ops, x)
            continue
        if 0 in shape[2:] and name.startswith(("pool", "squeeze", "depthwise_conv2d")):
            with pytest.raises(ValueError, match="channels and pixels"):
                results(operator, ops, x)
            continue
        assert_equal(results(operator, ops, x), want, edge)
        assert_equal(results(operator, ops, x.expand(shape), change=lambda grad: grad.expand_as(grad)), want, edge)


def transforms(call: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """PyTorch's ways to differentiate and to vectorize a function."""
    xs = torch.stack((x, x + 1, 2 - x))
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    grads = torch.stack([draw(*y.shape, seed=seed) for seed in range(3)])
    summed = lambda x: call(x).sum((2, 3))  # noqa: E731
    return {
        "is_grads_batched": lambda: torch.autograd.grad(y, leaf, grads, is_grads_batched=True)[0],
        "vmap": lambda: torch.vmap(call)(xs),
        "vmap of the second dimension": lambda: torch.vmap(call, in_dims=1, out_dims=2)(xs.transpose(0, 1)),
        "nested vmap": lambda: torch.vmap(torch.vmap(call))(torch.stack((xs, xs + 1))),
        "jacobian": lambda: jacobian(summed, x),
        "vectorized jacobian": lambda: jacobian(summed, x, vectorize=True),
        "vectorized jacobian, forward": lambda: jacobian(summed, x, vectorize=True, strategy="forward-mode"),
        "func.jacrev": lambda: torch.func.jacrev(summed)(x),
        "func.grad": lambda: torch.func.grad(lambda x: call(x).square().sum())(x),
        "vmap of func.grad": lambda: torch.vmap(torch.func.grad(lambda x: call(x).square().sum()))(xs),
        "func.jvp": lambda: torch.func.jvp(call, (x,), (x + 1,))[1],
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms(native, name):
    operator = OPERATORS[name]
    learned = [draw(*shape, seed=10 + i) for i, shape in enumerate(operator.learned)]
    x = draw(2, C, 3, 4).to(memory_format=torch.channels_last)
    mine = transforms(lambda x: operator.call(ops, x, *learned), x)
    theirs = transforms(lambda x: operator.call(reference, x, *learned), x)
    for transform, value in theirs.items():
        try:
            want = value()
        except RuntimeError as error:
            assert "atching rule" in str(error), transform  # PyTorch has none for max_pool2d's batched gradients
            continue
        got = mine[transform]()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda t, k=transform: f"{k}: {t}")


def test_batched_gradients_of_parameters(native):
    """Also of tensors in lists, and where the gradients are batched twice."""
    operator, x = OPERATORS["inverted residual relu6 eval"], draw(2, C, 3, 4)
    gradients = []
    for module in (ops, reference):
        learned = [draw(*shape, seed=10 + i).requires_grad_() for i, shape in enumerate(operator.learned)]
        y = operator.call(module, x, *learned)
        grads = draw(2, 3, *y.shape, seed=1)
        backward = lambda grad, y=y, learned=learned: torch.autograd.grad(y, learned, grad, retain_graph=True)  # noqa: E731
        gradients.append(
            [*torch.vmap(torch.vmap(backward))(grads), *torch.vmap(backward, in_dims=1)(grads[0].transpose(0, 1))]
        )
    assert_equal(*gradients)


def test_orthogonalize_is_differentiated_and_vectorized_by_the_reference(native):
    z = draw(3, 5, 4)
    assert_equal([torch.vmap(lambda z: ops.orthogonalize([z])[0])(z)], [ops.orthogonalize([z])[0]])
    got, want = (
        torch.func.jacrev(lambda z, f=f: f([z])[0])(z[0]) for f in (ops.orthogonalize, reference.orthogonalize)
    )
    assert_equal([got], [want])
    assert [q.shape for q in ops.orthogonalize([torch.zeros(0, 3), torch.zeros(2, 3, 0)])] == [(0, 3), (2, 3, 0)]
