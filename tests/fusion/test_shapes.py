"""What `known_sizes` says of activations and means of fake tensors is what PyTorch's rules say."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from nasfast.fusion.shapes import known_sizes


def described(x):
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("function", [F.hardtanh, F.relu6, F.hardswish, F.hardsigmoid, F.silu, F.gelu])
def test_activations(function, layout, frozen, dtype):
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, 4, dtype=dtype).contiguous(memory_format=layout).requires_grad_(not frozen)
        expected = function(x)
        with known_sizes():
            result = function(x)
            assert described(result) == described(expected) and result is not x
            if function is not F.gelu:
                y = torch.empty_like(x).mul(x)
                assert function(y, inplace=True) is y and described(y) == described(expected)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [1, (1, 1), 2, (None, 1)])
def test_means_of_pixels(size, layout, frozen):
    with FakeTensorMode():
        x = torch.empty(2, 3, 4, 4).contiguous(memory_format=layout).requires_grad_(not frozen)
        expected = F.adaptive_avg_pool2d(x, size)
        with known_sizes():
            assert described(F.adaptive_avg_pool2d(x, size)) == described(expected)


def test_tensors_with_numbers_are_computed():
    x = torch.tensor([-9.0, 0.5, 9.0])
    with known_sizes():
        assert torch.equal(F.relu6(x), torch.tensor([0.0, 0.5, 6.0]))
    assert torch.equal(F.relu6(x), torch.tensor([0.0, 0.5, 6.0]))
