"""The autograd of registered operators, on operators of its own."""

import pytest
import torch
from torch import Tensor

from nasfast.ops.autograd import autograd_kernel

_library = torch.library.Library("nasfast_autograd_test", "DEF")
_library.define("weighted(Tensor[] xs, Tensor gates, float scale, Tensor[] added) -> (Tensor y, Tensor count)")
_library.define("with_default(Tensor x, float scale=1.0) -> Tensor")


def weighted(xs: list[Tensor], gates: Tensor, scale: float, added: list[Tensor]) -> tuple[Tensor, Tensor]:
    y = sum(gate * x for x, gate in zip(xs, gates.unbind(), strict=True)) * scale
    return sum(added, y), torch.tensor(len(xs))


def setup_context(ctx, inputs, output):
    xs, gates, ctx.scale, added = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.flags = ctx.needs_input_grad[: len(xs) + 2 + len(added)]
    ctx.save_for_backward(gates, *xs)


def backward(ctx, grad, grad_count):
    want_xs, want_gates, want_scale, want_added = ctx.needs_input_grad
    assert [*want_xs, want_gates, want_scale, *want_added] == list(ctx.flags)
    gates, *xs = ctx.saved_tensors
    dxs = [grad * gate * ctx.scale if want else None for gate, want in zip(gates, want_xs, strict=True)]
    dgates = torch.stack([(grad * x).sum() * ctx.scale for x in xs]) if want_gates else None
    return dxs, dgates, None, [grad if want else None for want in want_added]


operator = torch.ops.nasfast_autograd_test.weighted.default
_library.impl("weighted", weighted, "CPU")
_library.impl("weighted", autograd_kernel(operator, setup_context, backward), "Autograd", with_keyset=True)


@pytest.mark.parametrize("added", [0, 2])
@pytest.mark.parametrize("wanted", ["all", "gates", "some"])
def test_lists_of_tensors_have_gradients(wanted, added):
    torch.manual_seed(0)
    leaves = [torch.randn(3, dtype=torch.float64) for _ in range(3 + added)] + [torch.randn(3, dtype=torch.float64)]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(
            wanted == "all" or (wanted == "gates" and i == len(leaves) - 1) or (wanted, i) == ("some", 1)
        )
    arguments = leaves[:3], leaves[-1], 2.0, leaves[3:-1]
    y, count = operator(*arguments)
    assert y.requires_grad and not count.requires_grad and int(count) == 3
    wanting = [leaf for leaf in leaves if leaf.requires_grad]
    got = torch.autograd.grad(y, wanting, torch.arange(3.0, dtype=torch.float64))
    want = torch.autograd.grad(weighted(*arguments)[0], wanting, torch.arange(3.0, dtype=torch.float64))
    torch.testing.assert_close(got, want)


def test_without_gradients_there_is_no_history():
    xs, gates = [torch.randn(3, requires_grad=True)], torch.ones(1)
    with torch.no_grad():
        assert operator(xs, gates, 1.0, [])[0].grad_fn is None
    assert operator([xs[0].detach()], gates, 1.0, [])[0].grad_fn is None


def test_it_refuses_arguments_with_default_values():
    with pytest.raises(ValueError, match="arguments with default values"):
        autograd_kernel(torch.ops.nasfast_autograd_test.with_default.default, setup_context, backward)
