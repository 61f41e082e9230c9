import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nasfast.shrink.fold import Folded
from nasfast.shrink.graph import capture, op_name


class Network(nn.Module):
    """Layers with a norm that they can take, and others whose norm they cannot."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.grouped, self.grouped_norm = nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8, affine=False)
        self.second_norm = nn.BatchNorm2d(8)
        self.read_twice, self.read_norm = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        self.other, self.other_bias, self.other_norm = (
            nn.Conv2d(4, 4, 1),
            nn.Parameter(torch.randn(4)),
            nn.BatchNorm2d(4),
        )
        self.linear, self.linear_norm, self.classifier = nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = self.second_norm(self.grouped_norm(self.grouped(x)))  # a norm behind a norm
        x = self.read_twice(x)
        x = x + self.read_norm(x)
        # the bias is not the module's
        x = self.other_norm(F.conv2d(x, self.other.weight, self.other_bias))
        return self.classifier(torch.relu(self.linear_norm(self.linear(x.flatten(1)))))


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = Network().double()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval().requires_grad_(False)


def test_a_network_with_folded_norms_computes_the_same_without_their_calls(network):
    images = torch.randn(3, 3, 6, 6).double()
    program = capture(network, images)
    tensors = program.tensors(network)
    folded = Folded(program, network, tensors)
    seen = []
    norms = [node for node in program.nodes if op_name(node) == "batch_norm"]
    see = dict.fromkeys(norms, seen.append)
    got, _ = program.run(tensors, {program.image: images}, replace=folded.changes, see=see)
    torch.testing.assert_close(got, network(images))
    assert len(norms) == 6 and len(seen) == 2


def test_a_folded_layer_takes_other_weights_and_what_is_added_before_its_norm(network):
    images = torch.randn(3, 3, 6, 6).double()
    program = capture(network, images)
    tensors = program.tensors(network)
    folded = Folded(program, network, tensors)
    first = next(node for node in program.nodes if op_name(node) == "conv2d")
    weight, extra = torch.randn_like(network.stem.weight), torch.randn(8).double()
    change = {**folded.changes, first: folded.layer(first, weight, extra)}
    other = copy.deepcopy(network)
    other.stem.weight.copy_(weight)
    other.stem.bias.add_(extra)
    want = other(images)
    got, _ = program.run(tensors, {program.image: images}, replace=change)
    torch.testing.assert_close(got, want)
    # from between a layer and its norm
    start = program.index(first) + 1
    _, kept = program.run(tensors, {program.image: images}, replace=change, keep={start: program.live(start)})
    got, _ = program.run(tensors, kept[start], start=start, replace=change)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("norms", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_is_rounded_once(network, norms):
    images = torch.randn(3, 3, 6, 6)
    exact = network(images.double())
    network.bfloat16()
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.to(norms)
    images = images.bfloat16()
    program = capture(network, images)
    tensors = program.tensors(network)
    got, _ = program.run(tensors, {program.image: images}, replace=Folded(program, network, tensors).changes)
    assert got.dtype == torch.bfloat16
    plain = network(images).double()
    assert (got - exact).abs().max() < 1.5 * (plain - exact).abs().max() + 0.02 * exact.abs().max()
