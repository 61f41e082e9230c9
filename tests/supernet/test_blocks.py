"""ShuffleNetV2 units against a plain re-statement, the strided identity, and block kinds of a user's own."""

from __future__ import annotations

import pytest
import torch
from tiny import batches
from torch import nn
from torch.nn import functional as F
from torchvision.models import efficientnet

from nasfast.indicators.bn_gamma import score
from nasfast.spaces import Block, Cost, FixedLayer, Layer, SearchSpace, Stage, UniformSampler, block_cost
from nasfast.supernet import Supernet, UnitFactory, block_builder, inherit
from nasfast.supernet.blocks import build_block
from nasfast.train import TrainConfig, train_supernet


def conv_bn(x, unit, *, stride: int = 1, relu: bool):
    weight = unit.conv.weight
    groups = x.shape[1] // weight.shape[1]
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
    x = F.batch_norm(x, None, None, unit.bn.weight, unit.bn.bias, training=True)
    return F.relu(x) if relu else x


def shuffle_unit(x, block, *, stride: int, xception: bool):
    """Single Path One-Shot, written out: odd channels through the branch, even ones past it; both at stride 2."""
    n, c, h, w = x.shape
    if stride == 1:
        pairs = x.reshape(n, c // 2, 2, h, w)
        bypass, branch = pairs[:, :, 0], pairs[:, :, 1]
    else:
        bypass = conv_bn(conv_bn(x, block.projection[0], stride=2, relu=False), block.projection[1], relu=True)
        branch = x
    if xception:
        for i in range(3):
            branch = conv_bn(branch, block.main[2 * i], stride=stride if i == 0 else 1, relu=False)
            branch = conv_bn(branch, block.main[2 * i + 1], relu=True)
    else:
        branch = conv_bn(branch, block.main[0], relu=True)
        branch = conv_bn(branch, block.main[1], stride=stride, relu=False)
        branch = conv_bn(branch, block.main[2], relu=True)
    return torch.cat((bypass, branch), 1)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "block", [Block("shuffle", 3), Block("shuffle", 7), Block("shuffle_xception", 3)], ids=lambda b: b.label
)
def test_shuffle_units(block, stride, fused):
    layer = Layer(12, 12 if stride == 1 else 20, stride, 9, (block,))
    module = build_block(block, layer, UnitFactory(act="relu", fused=fused, track_running_stats=False)).train()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * 0.4 + (1.0 if p.ndim == 1 else 0.0))
    x = torch.randn(3, 12, 9, 9)
    want = shuffle_unit(x, module, stride=stride, xception=block.kind == "shuffle_xception")
    torch.testing.assert_close(module(x), want, rtol=1e-4, atol=1e-4)
    assert module.block_indicator is list(module.main.modules())[-2]
    assert module.block_indicator.num_features == want.shape[1] - (6 if stride == 1 else 12)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("expand", [1, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_fused_mbconv_is_torchvisions(stride, expand, fused):
    """The same weights, in the same order, give the same result and gradients."""
    out = 16 if stride == 1 else 24
    layer = Layer(16, out, stride, 9, (Block("fused_mbconv", 3, expand),))
    ours = build_block(layer.choices[0], layer, UnitFactory(act="silu", fused=fused, track_running_stats=True))
    settings = efficientnet.FusedMBConvConfig(expand, 3, stride, 16, out, 1)
    theirs = efficientnet.FusedMBConv(settings, 0.0, nn.BatchNorm2d).double()
    with torch.no_grad():
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            p.copy_(torch.randn(p.shape) * 0.4 + (1.0 if p.ndim == 1 else 0.0))
            q.copy_(p)
    x = torch.randn(3, 16, 9, 9)
    results = []
    for module, given in ((ours, x.clone().requires_grad_()), (theirs, x.double().requires_grad_())):
        y = module(given)
        y.square().mean().backward()
        results.append([y, given.grad, *(p.grad for p in module.parameters()), *module.buffers()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-5)
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm2d)]
    assert ours.block_indicator is norms[-1]


def test_strided_identity_is_a_convolution_and_its_batch_norm():
    layer = Layer(6, 10, 2, 7, (Block("identity"),))
    module = build_block(layer.choices[0], layer, UnitFactory(act="relu6", fused=True, track_running_stats=False))
    x = torch.randn(2, 6, 7, 7)
    torch.testing.assert_close(module(x), conv_bn(x, module.unit, stride=2, relu=False), rtol=1e-4, atol=1e-5)
    assert (module(x) < 0).any()


class _Pooled(nn.Module):
    """A max pool in front of a 1x1 unit."""

    def __init__(self, layer, kernel, units) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(kernel, layer.stride, kernel // 2)
        self.unit = units.conv_bn_act(layer.in_channels, layer.out_channels, 1)
        self.block_indicator = self.unit.block_indicator

    def forward(self, x):
        return self.unit(self.pool(x))


def test_a_kind_of_ones_own_works_end_to_end(own_kinds, tmp_path):
    @block_cost("pooled")
    def _(block, in_channels, out_channels, stride, size):
        weights = in_channels * out_channels
        return Cost(weights * (-(-size // stride)) ** 2, weights + 2 * out_channels)

    @block_builder("pooled")
    def _(block, layer, units):
        return _Pooled(layer, block.kernel, units)

    choices = (Block("pooled", 3), Block("pooled", 5), Block("mbconv", 3, 2))
    space = SearchSpace("own", 16, 4, (FixedLayer(Block("conv"), 6),), (Stage(8, 2, 2, choices),), ())
    net = Supernet(space)
    assert "layers.0.candidates.0.unit.bn.weight" in {n for n, p in net.named_parameters() if p.requires_grad}
    train_supernet(
        net, batches(4), UniformSampler(space, layer_indicators=True), TrainConfig(epochs=2, lr=0.5), run_dir=tmp_path
    )
    table = score(net)
    assert set(table.block[0]) == {0, 1, 2}
    assert any(value != 1.0 for value in table.block[0].values())
    network = inherit(net, (0, 1))
    assert sum(p.numel() for p in network.parameters()) == space.cost((0, 1)).params
    x = torch.randn(3, 3, 16, 16)
    torch.testing.assert_close(net(x, (0, 1)), network.train()(x), rtol=1e-4, atol=1e-4)


def test_a_kind_is_registered_once(own_kinds):
    with pytest.raises(KeyError, match="'mbconv' already has a cost"):
        block_cost("mbconv")(lambda *_: Cost())
    with pytest.raises(KeyError, match="'mbconv' already has a builder"):
        block_builder("mbconv")(lambda *_: nn.Identity())


@pytest.mark.parametrize("block_indicator", [None, "bn"])
def test_a_kind_without_its_block_indicator_is_refused(own_kinds, block_indicator):
    block_cost("pool")(lambda *_: Cost())

    @block_builder("pool")
    def _(block, layer, units):
        module = nn.MaxPool2d(3, layer.stride, 1)
        if block_indicator is not None:
            module.block_indicator = block_indicator
        return module

    space = SearchSpace("own", 16, 4, (), (Stage(3, 1, 2, (Block("pool"),)),), ())
    with pytest.raises(ValueError, match="'pool': the block_indicator of its module must be an nn.BatchNorm2d, got"):
        Supernet(space)


def test_a_cost_without_a_module_is_named(own_kinds):
    block_cost("poooled")(lambda *_: Cost())
    block_builder("pooled")(lambda *_: nn.Identity())
    space = SearchSpace("own", 16, 4, (), (Stage(3, 1, 1, (Block("poooled"),)),), ())
    with pytest.raises(ValueError, match="'poooled' has a cost but no module; did you mean 'pooled'"):
        Supernet(space)
