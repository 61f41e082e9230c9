"""Copies of frozen weights in 16 bits."""

import torch

from nasfast.ops.low_precision import LowPrecisionWeights


def test_a_copy_keeps_its_place_and_follows_its_weight():
    low_precision = LowPrecisionWeights(torch.bfloat16)
    weights = [torch.randn(4, 3, 1, 1), torch.randn(5)]
    copies = [low_precision.get(weights[0])]
    weights[0].mul_(2)  # before the other one is rounded
    copies.append(low_precision.get(weights[1]))
    assert not torch.equal(copies[0], weights[0].bfloat16())
    low_precision.refresh()
    for weight, copy in zip(weights, copies, strict=True):
        assert low_precision.get(weight.detach()) is copy
        assert torch.equal(copy, weight.bfloat16())
