"""Aligned weights: the linear parts of a layer's candidates are one matrix R, or a share of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tiny import tiny_space
from torch import nn

from nasfast.spaces import BUILDERS, Block, FixedLayer, Stage, nas_bench_macro
from nasfast.supernet import InitScheme, Supernet, aligned

GAIN = {"identity": 1.0, "relu": math.sqrt(2), "relu6": math.sqrt(2)}


def linear_part(units: list[nn.Module]) -> torch.Tensor:
    """(out, in): what a path does to one pixel without norms and activations, its filters being single centre taps."""
    product = torch.eye(units[0].conv.in_channels, dtype=torch.float64)
    for unit in units:
        if unit.conv.groups == 1:
            product = unit.conv.weight.detach().double().flatten(1) @ product
    return product


def expands(units: list[nn.Module]) -> bool:
    """Whether the last unit reads more channels than the path has at its beginning."""
    return units[-1].conv.in_channels > units[0].conv.in_channels


def branches(candidate: nn.Module) -> dict[str, list[nn.Module]]:
    """Units by branch, written down here for each kind of block, and not taken from the block's `linear_paths()`."""
    kind = type(candidate).__name__
    if kind.endswith("InvertedResidual"):
        units = (candidate.expand, candidate.depthwise, candidate.project)
        return {"": [unit for unit in units if unit is not None]}
    if kind == "StridedIdentity":
        return {"": [candidate.unit]}
    assert kind == "ShuffleUnit"
    return {"main": [*candidate.main], **({"side": [*candidate.projection]} if candidate.projection else {})}


def test_the_linear_part_of_every_candidate_is_the_layers_matrix_or_its_share(small_space):
    if small_space.name == "small_shuffle":  # whose second stage narrows; those of shufflenet_v2 do not
        first, second = small_space.stages
        small_space = small_space.replace(stages=(first, second.replace(out=24)))
    net = Supernet(small_space, init="aligned")
    shared = []
    for layer in net.layers:
        parts: dict[str, list[torch.Tensor]] = {}
        for candidate in layer.candidates:
            if not isinstance(candidate, nn.Identity):
                for role, units in branches(candidate).items():
                    share = 0.85 if expands(units) else 1.0
                    parts.setdefault(role, []).append(linear_part(units) / (share * GAIN[units[-1].act_name]))
        for first, *others in parts.values():
            for other in others:
                torch.testing.assert_close(other, first, rtol=0, atol=1e-6)
            # Haar times sqrt(max(1, out / in)): all singular values are equal
            scale = math.sqrt(max(1.0, first.shape[0] / first.shape[1]))
            values = torch.linalg.svdvals(first)
            torch.testing.assert_close(values, torch.full_like(values, scale), rtol=0, atol=1e-6)
            if first.shape[0] >= first.shape[1]:
                assert first.square().sum(1).mean().item() == pytest.approx(1.0, rel=1e-6)
            shared.append(first)
    for one, other in itertools.combinations(shared, 2):
        assert one.shape != other.shape or not torch.allclose(one, other)


@pytest.mark.parametrize(("hidden", "channels", "out"), [(12, 4, 6), (40, 16, 16), (9, 8, 5), (8, 8, 8)])
def test_the_last_weight_is_the_shared_part_and_a_rest_that_reads_nothing_of_it(hidden, channels, out):
    """The parts of the module's docstring, by themselves: N is the part of a matrix that reads nothing of Q."""
    generator = torch.Generator().manual_seed(hidden)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    product = 3 * torch.linalg.qr(draw(hidden, channels))[0]
    shared, own, beta = draw(out, channels), draw(out, hidden), 0.6
    linear = shared @ torch.linalg.pinv(product)  # R Q^T / s
    rest = own - own @ product @ torch.linalg.pinv(product)
    want = linear
    if hidden > channels:
        rest *= math.sqrt(hidden / channels) * linear.norm() / rest.norm()
        want = beta * linear + math.sqrt(1 - beta**2) * rest
    torch.testing.assert_close(aligned._last_weight(shared, product, own, beta), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_depthwise_filters_are_a_centre_tap_and_a_random_rest(alpha):
    net = Supernet(nas_bench_macro(), init=InitScheme(depthwise="unit_norm", alignment=alpha))
    filters = net.layers[3].candidates[2].depthwise.conv.weight.detach().double()[:, 0] / math.sqrt(2)
    rest = filters.clone()
    rest[:, 2, 2] -= alpha
    torch.testing.assert_close(
        rest.square().sum((1, 2)), torch.full((len(rest),), 1 - alpha**2).double(), rtol=0, atol=1e-5
    )
    # the mean squared row norm is g^2, the cross term being 2 alpha sqrt(1 - alpha^2) times the mean centre of the rest
    assert filters.square().sum((1, 2)).mean().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("name", [name for name, build in BUILDERS.items() if build().LAYERWISE])
def test_every_space_of_the_package_can_be_aligned(name):
    net = Supernet(BUILDERS[name](num_classes=3, resolution=32), init="aligned")
    assert all(torch.isfinite(p).all() for p in net.parameters())


def test_blocks_that_cannot_be_aligned_are_named(shuffle_space):
    conv = tiny_space(stages=(Stage(8, 1, 1, (Block("conv", 3), Block("mbconv", 3, 2))),))
    with pytest.raises(ValueError, match=r"layers\.0\.candidates\.0 is a ConvBNAct.*: choose init='orthogonal'"):
        Supernet(conv, init="aligned")
    # stem and head have one candidate each, with nothing to agree with
    Supernet(tiny_space(stem=(FixedLayer(Block("conv", 3), 8, stride=2),)), init="aligned")
    with pytest.raises(ValueError, match=r"layers\.2\.candidates\.0 narrows from 12 to 8 channels"):
        Supernet(shuffle_space, init="aligned")
