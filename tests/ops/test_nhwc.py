"""The functions between chains: PyTorch's values and gradients, bit for bit, in channels_last."""

from itertools import product

import pytest
import torch

from nasfast.ops import nhwc

NHWC = torch.channels_last
FUNCTIONS = {
    "mean": (nhwc.pixel_mean, lambda x: x.mean((2, 3))),
    "subsample": (lambda x: nhwc.subsample(x, 2), lambda x: x[:, :, ::2, ::2]),
    "concatenate": (lambda x: nhwc.concatenate(x, 2 * x), lambda x: torch.cat((x, 2 * x), 1)),
}
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def differentiate(function, x, grad):
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.parametrize(("name", "dtype"), list(product(FUNCTIONS, TYPES)), ids=str)
def test_values_and_gradients_are_those_of_pytorch(name, dtype):
    ours, theirs = FUNCTIONS[name]
    for shape, layout in product([(3, 6, 5, 7), (2, 1, 4, 1), (1, 5, 1, 1)], [NHWC, torch.contiguous_format]):
        x = torch.randn(shape).to(dtype).contiguous(memory_format=layout)
        grad = torch.randn_like(theirs(x))
        for got, want in zip(differentiate(ours, x, grad), differentiate(theirs, x, grad), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_gradients_of_a_mean_are_channels_last_where_its_input_is():
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=NHWC).requires_grad_()
    (gradient,) = torch.autograd.grad(nhwc.pixel_mean(x).sum(), x)
    assert gradient.is_contiguous(memory_format=NHWC)


def test_a_mean_has_second_derivatives_and_transforms():
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=NHWC).requires_grad_()
    assert torch.autograd.gradgradcheck(nhwc.pixel_mean, x)
    point = x.detach()
    tangent = torch.randn_like(point)
    torch.testing.assert_close(torch.func.jvp(nhwc.pixel_mean, (point,), (tangent,))[1], tangent.mean((2, 3)))
    (pulled,) = torch.func.vjp(nhwc.pixel_mean, point)[1](torch.ones(2, 3, dtype=torch.float64))
    torch.testing.assert_close(pulled, torch.full_like(point, 1 / 20))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_may_come_in_batches(name):
    ours, theirs = FUNCTIONS[name]
    x = torch.randn(2, 6, 5, 7).contiguous(memory_format=NHWC).requires_grad_()
    y, expected = ours(x), theirs(x)
    grads = torch.randn(3, *y.shape)
    want = torch.stack([torch.autograd.grad(expected, x, grad, retain_graph=True)[0] for grad in grads])
    (batch,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    mapped = torch.vmap(lambda grad: torch.autograd.grad(y, x, grad, retain_graph=True)[0])(grads)
    for got in (batch, mapped):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_results_are_in_the_pool(native):
    if "-fsanitize" in native.build_info().flags:
        pytest.skip("the sanitizer's build has no pool")
    like = torch.empty(0)
    before = native.pool_bytes()[0]
    y = nhwc.empty_nhwc((4, 64, 64, 64), like)
    assert y.is_contiguous(memory_format=NHWC) and native.pool_bytes()[0] == before + y.nbytes


@pytest.mark.parametrize(
    ("like", "shape", "message"),
    [
        (torch.empty(0), (2, 3, 4), "4 dimensions, got 3"),
        (torch.empty(0, dtype=torch.float64), (2, 3, 4, 5), "float32 or bfloat16"),
        (torch.empty(0), (2, 3, -4, 5), "not be negative, got -4"),
    ],
)
def test_bad_arguments_are_refused(like, shape, message, native):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.nasfast.empty_nhwc(like, shape)


def test_its_fake_kernel_agrees(native):
    torch.library.opcheck(torch.ops.nasfast.empty_nhwc, (torch.empty(0), (2, 3, 4, 5)), test_utils="test_schema")
    with torch._subclasses.FakeTensorMode():
        fake = torch.ops.nasfast.empty_nhwc(torch.empty(0), (2, 3, 4, 5))
    assert fake.stride() == torch.ops.nasfast.empty_nhwc(torch.empty(0), (2, 3, 4, 5)).stride()
