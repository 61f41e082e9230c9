"""Closed-form costs against what the modules do: multiply-accumulates counted by torch, and parameters."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nasfast.spaces import BUILDERS, SKIP, Block, Cost, Layer, SqueezeExcite, mobilenet_v2, mobilenet_v3
from nasfast.spaces.blocks import _BLOCK_COSTS
from nasfast.supernet import StandaloneNetwork, Supernet, UnitFactory
from nasfast.supernet.blocks import build_block

LAYERWISE = {name: space for name, build in BUILDERS.items() if (space := build()).LAYERWISE}
SPACES = LAYERWISE | {"bnnas": mobilenet_v2(variant="bnnas")}


def measured(module: nn.Module, *shape: int) -> tuple[Cost, torch.Size]:
    """MACs and parameters of a module on one image, and the shape of its output; nothing is computed on `meta`."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = module(torch.empty(1, *shape, device="meta"))
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return Cost(flops // 2, sum(p.numel() for p in module.parameters())), out.shape


@pytest.fixture(params=sorted(SPACES))
def space(request):
    return SPACES[request.param]


def test_every_candidate_costs_what_the_table_says(space):
    units = UnitFactory(act=space.activation, fused=False, track_running_stats=True)
    seen = set()
    for layer in (*space.stem_layers, *space.layers, *space.head_layers):
        for choice, block in enumerate(layer.choices):
            shapes = (layer.in_channels, layer.out_channels, layer.stride, layer.size)
            if (block, shapes) in seen:
                continue
            seen.add((block, shapes))
            with torch.device("meta"):
                module = build_block(block, layer, units).eval()
            cost, out = measured(module, layer.in_channels, layer.size, layer.size)
            assert cost == layer.cost(choice), (block, shapes)
            side = 1 if block.kind == "hidden" else -(-layer.size // layer.stride)
            assert out == (1, layer.out_channels, side, side), (block, shapes)
    assert len(seen) > len(space.stages)


KINDS = [Block(kind, kernel, 2) for kind in sorted(_BLOCK_COSTS.keys() - {"hidden"}) for kernel in (3, 5)]
EXCITED = [
    Block("mbconv", 5, expand, se)
    for expand in (1, 2.3, 6)
    for se in (SqueezeExcite(), SqueezeExcite(0.1), SqueezeExcite(1.0, "silu", "sigmoid"))
]


@pytest.mark.parametrize(("out_channels", "stride"), [(12, 1), (32, 2)])
@pytest.mark.parametrize("block", [*KINDS, *EXCITED], ids=str)
def test_every_kind_of_block_costs_what_its_module_does(block, out_channels, stride):
    """Kinds that no built-in space has included."""
    layer = Layer(12, out_channels, stride, 9, (block,))
    with torch.device("meta"):
        module = build_block(block, layer, UnitFactory("relu", fused=False, track_running_stats=True)).eval()
    side = {1: 9, 2: 5}[stride]
    assert measured(module, 12, 9, 9) == (layer.cost(0), (1, out_channels, side, side))
    if block in EXCITED:
        assert module.hidden_channels == {1: 12, 2.3: 28, 6: 72}[block.expand]


MOBILENET_V3_LARGE = "k3e4 k3e3 k5e3se k5e3se k5e3se k3e6 k3e2.5 k3e2.3 k3e2.3 k3e6se k3e6se k5e6se k5e6se k5e6se"


def mobilenet_v3_large():
    """The space and its architecture that is MobileNetV3-Large (Howard et al. 2019, table 1)."""
    space = mobilenet_v3()
    labels = [label.replace("e", " e", 1).replace("se", " se0.25") for label in MOBILENET_V3_LARGE.split()]
    labels_of = [[layer.label(choice) for choice in layer.options] for layer in space.layers]
    return space, tuple(of_layer.index(label) for of_layer, label in zip(labels_of, labels, strict=True))


def test_mobilenet_v3_has_torchvisions_large_network():
    """Its cost, and its function: the same weights, in the same order, give the same logits."""
    space, arch = mobilenet_v3_large()
    with torch.device("meta"):
        cost, _ = measured(torchvision.models.mobilenet_v3_large().eval(), 3, 224, 224)
    assert space.cost(arch) == cost == Cost(macs=216_589_760, params=5_483_032)
    theirs = torchvision.models.mobilenet_v3_large().eval()
    ours = StandaloneNetwork(space, arch).eval()
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        q.data = p.data.reshape(q.shape)
    for p, q in zip(norms(theirs), norms(ours), strict=True):
        q.eps = p.eps
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def norms(net: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]


def test_a_supernet_holds_every_candidate_once(small_space):
    """Parameters of the supernet: the fixed part, every candidate, and two per channel of every layer indicator."""
    net = Supernet(small_space)
    candidates = sum(layer.cost(c).params for layer in small_space.layers for c in layer.options if c != SKIP)
    indicators = sum(2 * u.in_channels for u in small_space.layers if u.indicator_choice is not None)
    total = sum(p.numel() for p in net.parameters())
    assert total == small_space.fixed_cost.params + candidates + indicators
