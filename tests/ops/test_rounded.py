"""Copies of frozen weights in 16 bits."""

import torch

from nasfast.ops.rounded import Rounded


def test_a_copy_keeps_its_place_and_follows_its_weight():
    rounded = Rounded(torch.bfloat16)
    weights = [torch.randn(4, 3, 1, 1), torch.randn(5)]
    copies = [rounded.of(weights[0])]
    weights[0].mul_(2)  # before the other one is rounded
    copies.append(rounded.of(weights[1]))
    assert not torch.equal(copies[0], weights[0].bfloat16())
    rounded.refresh()
    for weight, copy in zip(weights, copies, strict=True):
        assert rounded.of(weight.detach()) is copy
        assert torch.equal(copy, weight.bfloat16())
