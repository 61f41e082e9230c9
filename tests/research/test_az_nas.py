"""AZ-NAS's scores of blocks against closed forms and explicit Jacobians, and input that has no score."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_space
from torch import nn
from torchvision.models import mobilenet_v2, resnet18

from nasfast.indicators.isometry import largest_singular_value, mean_channel_jacobian, random_signs
from nasfast.indicators.registry import ScoreError
from nasfast.research.cells.space import nas_bench_201_space
from nasfast.research.zero_cost import blocks, expressivity, progressivity, trainability
from nasfast.supernet import build, untrained

EVERY = (expressivity, progressivity, trainability)


def images(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def pointwise(*weights: torch.Tensor) -> nn.Sequential:
    """1 x 1 convolutions without bias, one block each."""
    convs = [nn.Conv2d(w.shape[1], w.shape[0], 1, bias=False) for w in weights]
    for conv, weight in zip(convs, weights, strict=True):
        conv.weight.data = weight[:, :, None, None].clone()
    return nn.Sequential(*(nn.Sequential(conv) for conv in convs))


class Network(nn.Module):
    """Blocks of convolution, norm and activation, each a module."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.features = nn.ModuleList(parts)
        self.classifier = nn.LazyLinear(3)

    def forward(self, x):
        for part in self.features:
            x = part(x)
        return self.classifier(x.mean((2, 3)))


class Part(nn.Module):
    def __init__(self, inputs, outputs, *, stride=1, norm=True, inplace=False, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
        # before the convolution, where an activation in place would change the output of the block before
        self.act = nn.ReLU(inplace=inplace)
        self.norm = nn.BatchNorm2d(outputs) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.conv(self.act(x)))


def network(**changes) -> Network:
    parts = Part(2, 4, seed=1, **changes), Part(4, 4, seed=2, **changes), Part(4, 6, stride=2, seed=3, **changes)
    net = Network(*parts)
    net(images(4, 2, 6, 6))  # its lazy classifier gets its size
    return net


def test_trainability_of_scales_and_of_one_channel():
    """With one channel, M is the weight itself: s = |w|."""
    one = torch.ones(1, 1)
    net = pointwise(one, 3 * one, -0.5 * one)
    assert trainability(net, images(2, 1, 4, 4)) == pytest.approx(((2 - 3 - 1 / 3) + (2 - 0.5 - 2)) / 2, rel=1e-5)
    assert trainability(pointwise(one, -one, -one), images(2, 1, 4, 4)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("side", [6, 5])
def test_trainability_is_that_of_each_block_by_itself(side):
    net, x = network().double(), images(3, 2, side, side, dtype=torch.float64)
    generator, terms = torch.Generator().manual_seed(4), []
    before = net.features[0](x)
    for part in net.features[1:]:
        leaf = before.detach().requires_grad_()
        before = part(leaf)
        s = largest_singular_value(mean_channel_jacobian(leaf, before, random_signs(before, generator)))
        terms.append(2 - s - 1 / s)
    assert trainability(net, x, seed=4) == pytest.approx(sum(terms) / 2, rel=1e-9)


def test_entropies_of_principal_components():
    """Two independent channels of variances a and b have the entropy of the shares a and b."""
    net = pointwise(torch.eye(2), torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2))
    x = images(500, 2, 4, 4)
    x = (x - x.mean((0, 2, 3), keepdim=True)).transpose(0, 1).flatten(1).double()
    x = (torch.linalg.inv(torch.linalg.cholesky(x @ x.T / x.shape[1])) @ x).view(2, 500, 4, 4).transpose(0, 1).float()
    even, uneven = math.log(2), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert expressivity(net, x) == pytest.approx(even + 2 * uneven, rel=1e-4)
    assert progressivity(net, x) == pytest.approx(uneven - even, rel=1e-4)


def test_blocks_of_known_networks():
    names = ["conv1", *(f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1))]
    assert list(blocks(resnet18())) == names
    assert list(blocks(mobilenet_v2())) == [f"features.{i}" for i in range(19)]
    assert list(blocks(build(tiny_space(), (1, 0, 2, 1)))) == ["stem.0", *(f"blocks.{i}" for i in range(4)), "head.0"]
    assert list(blocks(nn.Sequential(network()))) == [f"0.features.{i}" for i in range(3)]


def test_every_cell_is_a_block_and_so_is_every_reduction():
    space = nas_bench_201_space(cells=2, channels=4)
    names = ["stem.0", "cells.0", "cells.1", "transitions.1"]
    for op in ("conv_3x3", "avg_pool_3x3"):
        net = untrained(space, (space.ops.index(op),) * 6)
        assert sorted(blocks(net)) == sorted(names)
        assert all(math.isfinite(score(net, images(4, 3, 8, 8))) for score in EVERY)


def test_activations_in_place_and_networks_without_norms_have_scores():
    x = images(4, 2, 6, 6)
    for norm in (True, False):
        net, plain = (network(norm=norm, inplace=inplace) for inplace in (True, False))
        assert [s(net, x) for s in EVERY] == pytest.approx([s(plain, x) for s in EVERY], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single_precision(dtype):
    net, x = network(), images(4, 2, 6, 6).to(dtype)
    half = network().to(dtype)
    net.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    assert [s(half, x) for s in EVERY] == [s(net, x.float()) for s in EVERY]


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(torch.ones_like(x))


class Several(Part):
    """A block with outputs beside its maps."""

    def forward(self, x):
        return super().forward(x), {"more": x}


class First(Part):
    def forward(self, x):
        return super().forward(x[0])


def test_a_tuple_counts_by_its_first_map():
    x = images(4, 2, 6, 6)
    plain = nn.Sequential(Part(2, 4, seed=1), Part(4, 4, seed=2))
    several = nn.Sequential(Several(2, 4, seed=1), First(4, 4, seed=2))
    assert [s(several, x) for s in EVERY] == [s(plain, x) for s in EVERY]


class Unchanged(Constant):
    def forward(self, x):
        return x


def infinite() -> nn.Sequential:
    net = nn.Sequential(Part(2, 4), Part(4, 4))
    net[1].conv.weight.data[0] = math.inf
    return net


@pytest.mark.parametrize(
    ("net", "scores", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), EVERY, "has 0 blocks, and the score compares at least two"),
        (nn.Sequential(Part(2, 4)), EVERY, "has 1 blocks, and the score compares at least two"),
        (nn.Sequential(Part(2, 4), Constant()), [trainability], "block '1': the output of a block does not depend"),
        (nn.Sequential(Part(2, 4), Constant()), [expressivity], "block '1' has the same output at all pixels"),
        (nn.Sequential(Part(2, 4), Unchanged()), [trainability], "block '1' passes its input on unchanged"),
        (infinite(), EVERY, "has no finite score: block '1' gives no finite map"),
    ],
)
def test_networks_without_a_score(net, scores, message):
    for score in scores:
        with pytest.raises(ScoreError, match=message):
            score(net, images(2, 2, 4, 4))
