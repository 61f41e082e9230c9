"""The isometry of blocks against explicit Jacobians in float64, invariances, and input that has no score."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.linalg import hadamard
from tiny import tiny_macro_space, tiny_space
from torch import nn
from torch.nn import functional as F

import nasfast
from nasfast.indicators import isometry as subject
from nasfast.indicators.isometry import candidate_maps, isometry_table, largest_singular_value, mean_channel_jacobian
from nasfast.indicators.registry import ScoreError
from nasfast.indicators.scores import Evidence, NetworkEvidence, score_networks, score_table, untrained_table
from nasfast.indicators.structure import structure_table
from nasfast.research.cells.space import nas_bench_201_space
from nasfast.spaces import Stage
from nasfast.supernet import Supernet


def conv_bn(stride: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(3)
        conv = nn.Conv2d(2, 3, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU()).double()


def maps(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def explicit(block: nn.Module, x: torch.Tensor, stride: int) -> torch.Tensor:
    """The mean over images and output pixels of the channel Jacobians, from the whole Jacobian of the batch."""
    jacobian = torch.autograd.functional.jacobian(block, x.detach())
    count, out, height, width = jacobian.shape[:4]
    mean = torch.zeros(x.shape[1] * stride**2, out, dtype=x.dtype)
    for n, h, w in itertools.product(range(count), range(height), range(width)):
        below = jacobian[n, :, h, w, n, :, stride * h : stride * (h + 1), stride * w : stride * (w + 1)]
        below = F.pad(below, (0, stride - below.shape[3], 0, stride - below.shape[2]))
        mean += below.flatten(1).T / (count * height * width)
    return mean


@pytest.mark.parametrize("side", [4, 5], ids=["stride divides", "stride does not divide"])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_expectation_over_signs_is_the_explicit_jacobian(stride, side):
    block, x = conv_bn(stride), maps(2, 2, side, side)
    y = block(x)
    # over the rows of a Hadamard matrix, the products of two columns average 0, as those of random signs do
    rows = torch.tensor(hadamard(2 ** math.ceil(math.log2(y.numel()))), dtype=torch.float64)
    total = sum(mean_channel_jacobian(x, block(x), row[: y.numel()].view(y.shape)) for row in rows) / len(rows)
    torch.testing.assert_close(total, explicit(block, x, stride), rtol=1e-9, atol=1e-12)


def test_the_table_is_that_of_plain_blocks_in_double_precision(monkeypatch):
    """Fused operators, random paths and the identity, against PyTorch's modules on the same maps."""
    space = tiny_macro_space()
    kept = []

    def keep(x, y, signs):
        kept.append((x.detach().clone(), signs.clone()))
        return mean_channel_jacobian(x, y, signs)

    monkeypatch.setattr(subject, "mean_channel_jacobian", keep)
    table = isometry_table(space, paths=1, batch=4, pixels=10**6, seed=5)
    plain = Supernet(space, init="gaussian", layer_indicators=False, fused=False, seed=5).double()
    places = [(p, c) for p, layer in enumerate(space.layers) for c in layer.options if c != layer.indicator_choice]
    assert len(kept) == len(places)
    for (place, choice), (x, signs) in zip(places, kept, strict=True):
        x = x.double().requires_grad_()
        s = torch.linalg.svdvals(mean_channel_jacobian(x, plain.layers[place](x, choice), signs.double()))[0]
        assert table.scores[place][choice] == pytest.approx(-math.log(s.item()), abs=1e-4)
    assert [table.scores[place][0] for place in (1, 3)] == [0, 0]


def test_a_table_averages_over_paths():
    space = tiny_space()
    settings = {"paths": 3, "batch": 4, "seed": 1}
    logs = [dict.fromkeys(options, 0.0) for options in space.options]
    generator = torch.Generator().manual_seed(1)
    for place, choice, x, y in candidate_maps(space, **settings):
        s = largest_singular_value(mean_channel_jacobian(x, y, subject.random_signs(y, generator)))
        logs[place][choice] -= math.log(s) / 3
    table = isometry_table(space, **settings)
    for row, expected in zip(table.scores, logs, strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


def test_a_candidate_takes_the_images_that_it_needs():
    space = tiny_space()  # its layers see maps of 8, 4, 4, 4 pixels and have 4 x 4 behind them
    counts = {len(x) for _, _, x, _ in candidate_maps(space, paths=1, batch=16, pixels=100)}
    assert counts == {7}
    assert {len(x) for _, _, x, _ in candidate_maps(space, paths=1, batch=6, pixels=100)} == {6}


def test_strides_that_do_not_divide_and_one_layer_have_a_table():
    space = tiny_space(resolution=15, stages=(Stage(8, 1, 3, tiny_space().stages[0].choices),))
    assert all(math.isfinite(value) for row in isometry_table(space, paths=1, batch=4).scores for value in row.values())


def test_of_a_space_without_images_or_training():
    space = tiny_macro_space()
    table = untrained_table("isometry", space, structure=5.0, seed=2)
    own = isometry_table(space, seed=2)
    assert table.meta["score"] == "isometry" and table.meta["structure"] == 5
    evidence = NetworkEvidence(space, (), seed=2)
    arch = (1, 2, 0, 1)
    assert score_networks("isometry", evidence, [arch])[0] == {arch: own.score(arch)}
    assert untrained_table("sqrt_size", space).scores == structure_table(space, "sqrt_size").scores
    with pytest.raises(ScoreError, match=r"'path_loss' needs training or images.*one of depth, isometry, macs"):
        untrained_table("path_loss", space)


def test_a_supernet_gives_its_activation():
    net = Supernet(tiny_space(), activation="identity", layer_indicators=False)
    table = score_table("isometry", Evidence(net, ()))
    assert table.scores == isometry_table(tiny_space(activation="identity")).scores


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda x: torch.ones(1, 2, 4, 4, dtype=x.dtype), "does not depend on its input"),
        (lambda x: (x * 0) @ x, "does not depend on its input"),
        (lambda x: x.mean((2, 3)), r"must map \(N, C, H, W\) to such maps"),
        (lambda x: F.interpolate(x, scale_factor=2.0), "must not enlarge its maps, got 4 x 4 -> 8 x 8"),
    ],
    ids=["constant", "zero", "vector", "enlarges"],
)
def test_blocks_without_a_jacobian_are_refused(block, message):
    x = maps(1, 2, 4, 4)
    y = block(x)
    with pytest.raises(ScoreError, match=message):
        mean_channel_jacobian(x, y, torch.ones_like(y))


def block_of(kernel: int, *, norm: bool = True, inplace: bool = False) -> nn.Sequential:
    conv = nn.Conv2d(4, 4, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(inplace=inplace), conv, nn.BatchNorm2d(4) if norm else nn.Identity())


def of_module(*candidates: nn.Module, **settings) -> nasfast.Supernet:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nasfast.Choice("only", candidates), nn.AdaptiveAvgPool2d(1))
    return nasfast.Supernet.from_module(module, torch.zeros(1, 3, 7, 7)).to(**settings)


def test_modules_of_one_choice_in_place_without_norms_and_in_half_precision():
    plain = isometry_table(of_module(block_of(3), block_of(5)), paths=2).scores
    assert isometry_table(of_module(*(block_of(k, inplace=True) for k in (3, 5))), paths=2).scores == plain
    for dtype in (torch.float16, torch.bfloat16):
        net = of_module(block_of(3), block_of(5), dtype=dtype)
        assert isometry_table(net, paths=2).scores[0] == pytest.approx(plain[0], abs=1e-2)
        assert all(p.dtype == dtype for p in net.parameters())
    without = isometry_table(of_module(*(block_of(k, norm=False) for k in (3, 5))), paths=2).scores
    assert all(map(math.isfinite, without[0].values())) and without != plain


class Ones(nn.Module):
    def forward(self, x):
        return torch.ones_like(x)


def test_a_module_of_a_choice_without_influence_is_named():
    with pytest.raises(ScoreError, match="choice 'only', 1 Ones: the output of a block does not depend on its input"):
        isometry_table(of_module(block_of(3), Ones()), paths=1)


def test_cells_have_no_table_of_layers():
    with pytest.raises(ScoreError, match="nas_bench_201 is a space of cells, and this score is a table of layers"):
        score_networks("isometry", NetworkEvidence(nas_bench_201_space(), ()), [(0,) * 6])


@pytest.mark.parametrize("settings", [{"paths": 0}, {"batch": 1}, {"pixels": 0}])
def test_too_few_paths_images_or_pixels(settings):
    with pytest.raises(ValueError, match="must be at least 1 and batch at least 2"):
        isometry_table(tiny_space(), **settings)
