"""Isometry of modules: against known matrices, torch's own Jacobians, closed forms, and between methods."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from nasfast.ops.modules import BNAct2d, ConvBNAct, InvertedResidual
from nasfast.research.analysis.jacobian import frozen_copy, isometry
from nasfast.supernet import initialize

METHODS = ("exact", "probes")


def orthogonal_linear(width: int) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False)
    nn.init.orthogonal_(layer.weight)
    return layer


def bottleneck(**changes) -> InvertedResidual:
    settings = {"kernel_size": 3, "stride": 1, "expand": 2, "act": "relu6"}
    block = InvertedResidual(8, 8, **{**settings, **changes})
    initialize(block, "orthogonal")
    return block


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "module",
    [nn.Identity(), orthogonal_linear(24), nn.Sequential(orthogonal_linear(24), orthogonal_linear(24))],
    ids=["identity", "orthogonal", "two"],
)
def test_orthogonal_maps_are_isometries(module, method):
    found = isometry(module, torch.randn(8, 24), method=method)
    assert abs(found.phi - 1) < 1e-5 and abs(found.varphi) < 1e-5
    assert abs(found.largest - 1) < 1e-5
    assert found.method == method
    assert abs(found.weights.sum() - 1) < 1e-6
    assert abs(found.quantile(0.5) - 1) < 1e-5


@pytest.mark.parametrize("shape", [(7, 12), (12, 7)], ids=["expansion", "projection"])
def test_singular_values_are_those_of_the_matrix(shape):
    out, inputs = shape
    layer = nn.Linear(inputs, out).double()
    found = isometry(layer, torch.randn(4, inputs), samples=2)
    wanted = torch.linalg.svdvals(layer.weight.detach())
    assert found.largest == pytest.approx(float(wanted.max()), rel=1e-12)
    phi, second = float((wanted**2).sum() / out), float((wanted**4).sum() / out)
    assert (found.phi, found.varphi) == pytest.approx((phi, second - phi**2), rel=1e-10)
    least = min(shape)
    phi, second = float((wanted**2).sum() / least), float((wanted**4).sum() / least)
    assert (found.phi_min, found.varphi_min) == pytest.approx((phi, second - phi**2), rel=1e-10)
    # an expansion has out - in zeros, and they count
    assert found.quantile(0.2) == pytest.approx(0.0 if out > inputs else float(wanted.sort()[0][1]), abs=1e-6)
    assert found.histogram(np.array([-1.0, 100.0])).sum() == pytest.approx(1)


def test_the_exact_jacobian_is_that_of_torch_func():
    block = bottleneck()
    x = torch.randn(16, 8, 5, 5)
    frozen = frozen_copy(block, x, dtype=torch.float64)
    wanted = [
        torch.linalg.svdvals(torch.func.jacrev(lambda h: frozen(h[None]).flatten())(h).flatten(1))
        for h in x[:3].double()
    ]
    found = isometry(block, x, samples=3, method="exact")
    np.testing.assert_allclose(found.values, np.sort(torch.cat(wanted).numpy()), rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [
        bottleneck,
        partial(bottleneck, act="tanh", kernel_size=5),
        partial(bottleneck, stride=2),
        partial(ConvBNAct, 8, 16, 3),
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.GroupNorm(2, 8)),
    ],
    ids=["relu6", "tanh", "stride 2", "expansion", "a user's"],
)
def test_probes_agree_with_the_exact_moments(block):
    block = block()  # here, where the seed is fixed
    x = torch.randn(64, 8, 6, 6)
    exact = isometry(block, x, method="exact")
    probes = isometry(block, x, method="probes", probes=256)
    assert abs(probes.phi - exact.phi) < 4 * probes.phi_error
    assert abs(probes.varphi - exact.varphi) < 4 * probes.varphi_error
    assert probes.phi == pytest.approx(exact.phi, rel=0.03)
    assert probes.largest == pytest.approx(exact.largest, rel=0.15)
    assert probes.largest <= exact.largest * (1 + 1e-3)
    edges = np.linspace(0, 8, 41)
    distance = np.abs(np.cumsum(probes.histogram(edges)) - np.cumsum(exact.histogram(edges))).max()
    assert distance < 0.15


def test_the_bias_of_the_squared_mean_is_removed():
    """Few probes of a linear map, many times: the mean of the estimates is the exact value."""
    torch.manual_seed(3)
    layer = nn.Linear(6, 6, bias=False)
    exact = isometry(layer, torch.randn(1, 6), samples=1)
    found = [
        isometry(layer, torch.randn(1, 6), samples=1, probes=2, method="probes", lanczos_steps=0, seed=seed).varphi
        for seed in range(300)
    ]
    assert abs(np.mean(found) - exact.varphi) < 4 * np.std(found) / math.sqrt(len(found))


def state_of(module: nn.Module) -> list:
    tensors = [(name, t.clone(), t.dtype, t.requires_grad) for name, t in module.state_dict(keep_vars=True).items()]
    modes = [(m.training, getattr(m, "track_running_stats", None), getattr(m, "padding_mode", None))
             for m in module.modules()]  # fmt: skip
    return [tensors, modes, [len(m._forward_pre_hooks) for m in module.modules()]]


def assert_unchanged(module: nn.Module, before: list) -> None:
    after = state_of(module)
    assert after[1:] == before[1:]
    for (name, old, dtype, grad), (_, new, *rest) in zip(before[0], after[0], strict=True):
        assert torch.equal(old, new) and rest == [dtype, grad], name


class Fails(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Dropout(0.5))
        self.how = how

    def forward(self, x):
        y = self.inner(x)
        match self.how:
            case "tuple":
                return y, y
            case "nan":
                return y / 0
            case "batch":
                return y.transpose(0, 1).contiguous()
            case "couples":
                return y - y.mean(0)
            case "raises":
                raise RuntimeError("no wish to")
            case "asserts":
                raise AssertionError("not so")
            case "slope":
                return (y * 0).sqrt()
        return y


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("tuple", "must return one tensor, got tuple"),
        ("nan", "output of the module is not finite"),
        ("batch", "the first dimension must be samples"),
        ("couples", "depends on other samples, and not by BatchNorm"),
        ("raises", "cannot take x of shape .* torch.float32: RuntimeError: no wish to"),
        ("asserts", "cannot take x of shape .*AssertionError: not so"),
        ("slope", "Jacobian is not finite"),
    ],
)
def test_errors_are_clear_and_leave_the_module_as_it_was(how, message):
    module = Fails(how).train()
    before = state_of(module)
    with pytest.raises(ValueError, match=message):
        isometry(module, torch.randn(8, 3, 4, 4))
    assert_unchanged(module, before)


@pytest.mark.parametrize("bn_mode", ["constant", "coupled"])
@pytest.mark.parametrize("method", METHODS)
def test_the_module_is_left_as_it_was(bn_mode, method):
    module = Fails("").train()
    before = state_of(module)
    generator = torch.get_rng_state()
    found = isometry(module, torch.randn(8, 3, 4, 4), bn_mode=bn_mode, method=method, circular=True, samples=2)
    assert math.isfinite(found.phi)
    assert_unchanged(module, before)
    assert generator.shape == torch.get_rng_state().shape


@pytest.mark.parametrize(
    ("x", "changes", "message"),
    [
        (torch.randn(8, 4, 6, 6), {}, "cannot take x of shape"),
        (torch.randn(3), {}, r"of shape \(N, ...\)"),
        (torch.zeros(8, 3, 4, 4, dtype=torch.long), {}, "must be floating"),
        (torch.full((8, 3, 4, 4), math.nan), {}, "x has elements that are not finite"),
        (torch.randn(8, 3, 4, 4), {"samples": 9}, "samples=9, but x has 8"),
        (torch.randn(8, 3, 4, 4), {"probes": 1}, "probes >= 2"),
        (torch.randn(8, 3, 4, 4), {"method": "exat"}, "did you mean 'exact'"),
        (torch.randn(8, 3, 4, 4), {"bn_mode": "x"}, "unknown bn_mode='x'; valid: constant, coupled"),
    ],
)
def test_wrong_arguments_are_named(x, changes, message):
    with pytest.raises(ValueError, match=message):
        isometry(Fails(""), x, **changes)


def test_a_batch_too_small_for_batchnorm_is_named():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="two values per channel"):
        isometry(module, torch.randn(1, 4), samples=1)


def test_batchnorm_modes():
    """A BatchNorm alone: constant divides by the batch's deviation, coupled projects besides."""
    x = torch.randn(64, 5) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    norm = nn.BatchNorm1d(5, eps=1e-9)
    norm.running_var.fill_(4.0)
    wanted = float((1 / x.double().var(0, correction=0)).mean())
    assert isometry(norm, x).phi == pytest.approx(wanted, rel=1e-6)
    # per channel I - 1 1^T / n - z z^T / n: two of 64 directions are lost
    assert isometry(norm, x, bn_mode="coupled", method="exact").phi == pytest.approx(wanted * 62 / 64, rel=1e-6)


def test_circular_padding_keeps_the_border():
    layer = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
    initialize(layer, "orthogonal")
    x = torch.randn(2, 6, 6, 6)
    assert isometry(layer, x, samples=1, circular=True).phi == pytest.approx(1, rel=1e-6)
    # a side of the border loses a third of the kernel's energy on average
    assert isometry(layer, x, samples=1).phi == pytest.approx((1 - 2 / 18) ** 2, rel=0.1)


def test_fused_blocks_are_measured_as_their_plain_twins():
    plain = bottleneck()
    fused = InvertedResidual(8, 8, kernel_size=3, stride=1, expand=2, fused=True)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(64, 8, 6, 6)
    assert isometry(fused, x, method="probes").phi == pytest.approx(isometry(plain, x, method="probes").phi, rel=1e-6)
    assert all(part.fused for part in [fused, *fused.units])
    assert isometry(BNAct2d(8, act="relu"), x, method="probes").phi == pytest.approx(0.5, abs=0.1)


def test_the_same_seed_gives_the_same_numbers():
    x = torch.randn(64, 8, 6, 6)
    first, second = (isometry(bottleneck(), x, method="probes", seed=5) for _ in range(2))
    np.testing.assert_equal(vars(first), vars(second))
    assert math.isnan(isometry(nn.Identity(), torch.randn(1, 3), samples=1).phi_error)
    without = isometry(bottleneck(), x, method="probes", lanczos_steps=0)
    assert without.largest == -math.inf and not len(without.values)


@pytest.mark.parametrize("bn_mode", ["constant", "coupled"])
def test_a_norm_that_runs_several_times_has_no_constant_statistics(bn_mode):
    """Those of its last input once served all of its inputs."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(10 * self.norm(x))

    module, x = Twice(), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    if bn_mode == "constant":
        with pytest.raises(ValueError, match="a BatchNorm runs several times"):
            isometry(module, x, bn_mode=bn_mode)
    else:
        assert isometry(module, x, bn_mode=bn_mode).phi > 0
