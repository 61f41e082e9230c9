"""Every initialisation against docs/method.md, section 1."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch
from tiny import tiny_space
from torch import nn

import nasfast
from nasfast.ops import BACKENDS, reference, use_backend
from nasfast.ops.modules import ConvBNAct
from nasfast.ops.orthogonal import tensor_generator
from nasfast.settings import SupernetConfig
from nasfast.spaces import Block, FixedLayer, SearchSpace, Stage, digits_mini
from nasfast.supernet import InitScheme, Supernet, build, init, initialize

GAIN = {"identity": 1.0, "tanh": 1.0, "relu": math.sqrt(2), "relu6": math.sqrt(2), "hswish": 2.0, "silu": 2.0}


def units(net: nn.Module):
    """(name, convolution, gain of the activation behind it) of every unit."""
    for name, module in net.named_modules():
        if isinstance(module, ConvBNAct):
            yield name, module.conv, GAIN[module.act_name]


def gram(weight: torch.Tensor) -> torch.Tensor:
    """W W^T of the shorter side of the flattened weight, float64."""
    matrix = weight.detach().double().flatten(1)
    return matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix


def assert_scaled_identity(matrix: torch.Tensor, scale: float) -> None:
    torch.testing.assert_close(matrix, scale * torch.eye(len(matrix), dtype=torch.float64), rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("activation", ["relu6", "relu", "tanh", "identity", "hswish", "silu"])
def test_orthogonal_matrices_and_filters(activation):
    net = Supernet(tiny_space(), init="orthogonal", activation=activation)
    kinds = set()
    for _, conv, gain in units(net):
        out, fan_in, k = conv.out_channels, conv.weight[0].numel(), conv.kernel_size[0]
        if conv.groups > 1:
            kinds.add("depthwise")
            for filter_ in conv.weight.detach().double()[:, 0]:
                assert_scaled_identity(filter_ @ filter_.T, gain**2 / k)
        else:
            kinds.add("wide" if out <= fan_in else "tall")
            # semi-orthogonal under the scale rule: the mean squared row norm is gain^2
            assert_scaled_identity(gram(conv.weight), gain**2 * max(1.0, out / fan_in))
        rows = conv.weight.detach().double().flatten(1).square().sum(1).mean()
        assert rows.item() == pytest.approx(gain**2, rel=1e-6)
    assert kinds == {"depthwise", "wide", "tall"}
    assert_scaled_identity(gram(net.classifier.weight), 1.0)
    assert not net.classifier.bias.any()


@pytest.mark.parametrize("activation", ["relu6", "identity"])
def test_delta_keeps_the_centre_tap_only(activation):
    net = Supernet(tiny_space(), init="delta_orthogonal", activation=activation)
    for _, conv, gain in units(net):
        k = conv.kernel_size[0]
        weight = conv.weight.detach().double()
        centre = weight[:, :, k // 2, k // 2]
        assert torch.equal(weight.square().sum((2, 3)), centre.square())
        if conv.groups > 1:
            torch.testing.assert_close(centre.abs(), torch.full_like(centre, gain), rtol=1e-6, atol=0)
        else:
            assert_scaled_identity(gram(centre), gain**2 * max(1.0, conv.out_channels / conv.in_channels))
    signs = torch.cat([c.weight.detach().sum((1, 2, 3)).sign() for _, c, _ in units(net) if c.groups > 1])
    assert 0.3 < (signs > 0).double().mean() < 0.7


# standard error of a sample variance of n values is sqrt(2 / n) of it; five of them
def assert_normal(weight: torch.Tensor, std: float) -> None:
    weight, n = weight.detach().double(), weight.numel()
    assert weight.mean().abs().item() < 5 * std / math.sqrt(n)
    assert weight.var().item() == pytest.approx(std**2, rel=5 * math.sqrt(2 / n))
    # a uniform or two-point distribution has a smaller fourth moment than 3
    assert (weight / std).pow(4).mean().item() == pytest.approx(3, abs=5 * math.sqrt(96 / n))


@pytest.mark.parametrize(("scheme", "activation"), [("gaussian", "relu6"), ("gaussian", "tanh"), ("he", "relu6")])
def test_gaussian_variance_is_gain_over_fan_in_and_that_of_he_fan_out_without_gain(scheme, activation):
    net = Supernet(digits_mini(), init=scheme, activation=activation)
    for _, conv, gain in units(net):
        fan_in, fan_out = conv.weight[0].numel(), conv.kernel_size[0] ** 2 * conv.out_channels
        if conv.weight.numel() > 500:
            assert_normal(conv.weight, gain / math.sqrt(fan_in) if scheme == "gaussian" else math.sqrt(2 / fan_out))
    assert_normal(net.classifier.weight, 1 / math.sqrt(160) if scheme == "gaussian" else 0.01)


@pytest.mark.parametrize("scheme", ["orthogonal", "aligned", "delta_orthogonal", "gaussian", "he"])
def test_batch_norms_start_at_one_and_zero(scheme):
    net = Supernet(tiny_space())
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(3.0)
    initialize(net, scheme)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    assert not (net.classifier.weight == 3).any()
    assert not net.classifier.bias.any()


@pytest.mark.parametrize("scheme", ["orthogonal", "aligned", "delta_orthogonal", "gaussian", "he"])
def test_seeds_decide_and_the_global_generator_does_not(scheme):
    state = lambda seed: Supernet(tiny_space(), init=scheme, seed=seed).state_dict()  # noqa: E731
    torch.manual_seed(1)
    first = state(0)
    torch.manual_seed(2)
    again, other = state(0), state(1)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert all(not torch.equal(first[n], other[n]) for n in first if n.endswith("conv.weight") and "depthwise" not in n)
    before = torch.get_rng_state()
    initialize(nn.Conv2d(4, 4, 3), scheme)
    torch.manual_seed(2)
    assert torch.equal(first["classifier.weight"], state(0)["classifier.weight"])
    torch.set_rng_state(before)
    module = nn.Conv2d(4, 4, 3)
    drawn = torch.get_rng_state()
    initialize(module, scheme)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("scheme", ["orthogonal", "aligned"])
def test_weights_do_not_depend_on_other_candidates(scheme):
    space = tiny_space()
    stages = tuple(stage.replace(choices=(*stage.choices, Block("mbconv", 7, 2))) for stage in space.stages)
    small, large = (Supernet(s, init=scheme, seed=3).state_dict() for s in (space, space.replace(stages=stages)))
    assert len(large) > len(small)
    for name, tensor in small.items():
        assert torch.equal(tensor, large[name]), name


def test_delta_warns_where_kernel_sizes_coincide(caplog):
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        Supernet(tiny_space(), init="delta_orthogonal")
    assert "a search cannot rank these kernel sizes" in caplog.text
    assert "3, 5" in caplog.text
    caplog.clear()
    one_size = tuple(s.replace(choices=(Block("mbconv", 3, 2), Block("mbconv", 3, 3))) for s in tiny_space().stages)
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        Supernet(tiny_space(stages=one_size), init="delta_orthogonal")
        Supernet(tiny_space(), init="orthogonal")
    assert not caplog.records


@pytest.mark.parametrize("scheme", ["orthogonal", "delta_orthogonal"])
def test_the_stem_of_a_grey_scale_network_is_dense(scheme):
    space = SearchSpace(
        "grey", 8, 2, (FixedLayer(Block("conv", 3), 8),), (Stage(8, 1, 1, (Block("mbconv", 3, 2),)),), (), in_channels=1
    )
    stem = Supernet(space, init=scheme).stem[0].conv
    assert stem.weight.shape == (8, 1, 3, 3)
    if scheme == "orthogonal":
        # 8 of 9 dimensions: the rows are orthogonal across channels, which separate filters would not be
        assert_scaled_identity(gram(stem.weight), 2.0)
    else:
        assert_scaled_identity(gram(stem.weight[:, :, 1, 1]), 2.0 * 8)


def test_unknown_scheme_names_the_nearest():
    with pytest.raises(ValueError, match="unknown scheme 'ortogonal'; did you mean 'orthogonal'"):
        Supernet(tiny_space(), init="ortogonal")


OPTIONS = {
    "pointwise": ("haar", "gaussian", "kaiming_out"),
    "depthwise": ("per_filter", "unit_norm", "delta", "gaussian", "kaiming_out"),
    "dense": ("flatten_qr", "delta", "gaussian", "kaiming_out"),
    "linear": ("haar", "gaussian", "small"),
}


def conv(in_channels: int, out: int, k: int, *, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out, k, groups=groups, bias=False).double()


def initialized(layer: nn.Module, seed: int = 0, **options) -> torch.Tensor:
    """The weight of a float64 layer; gain 1."""
    initialize(layer.double(), InitScheme(**options), seed=seed)
    return layer.weight.detach()


def circular_jacobian(weight: torch.Tensor, size: int) -> torch.Tensor:
    """(out size^2, in size^2) of the stride-1 convolution of a size x size torus."""
    inputs = torch.eye(weight.shape[1] * size**2, dtype=weight.dtype).reshape(-1, weight.shape[1], size, size)
    k = weight.shape[2]
    padded = nn.functional.pad(inputs, ((k - 1) // 2, k // 2) * 2, mode="circular")
    return nn.functional.conv2d(padded, weight).flatten(1).T


@pytest.mark.parametrize(("kind", "option"), [(kind, o) for kind, options in OPTIONS.items() for o in options])
def test_scale_rule_of_every_option(kind, option):
    layers = {
        "pointwise": [conv(24, 9, 1), conv(9, 24, 1), conv(8, 8, 1)],
        "depthwise": [conv(30, 30, 3, groups=30), conv(8, 24, 7, groups=8)],
        "dense": [conv(3, 40, 3), conv(8, 8, 3), conv(4, 6, 5)],
        "linear": [nn.Linear(10, 30), nn.Linear(30, 10)],
    }[kind]
    for layer in layers:
        weight = initialized(layer, **{kind: option})
        rows = weight.flatten(1).square().sum(1).mean().item()
        if option in ("gaussian", "kaiming_out", "small"):
            fan_in, k = weight[0].numel(), weight.shape[-1]
            var = {"gaussian": 1 / fan_in, "kaiming_out": 2 / (k**2 * len(weight)), "small": 1e-4}[option]
            assert rows == pytest.approx(var * fan_in, rel=6 * math.sqrt(2 / weight.numel()))
        else:
            assert rows == pytest.approx(1, rel=1e-12)


# of unit-norm k x k filters, circular padding
VARPHI = {
    "per_filter": lambda k: (k**2 - 1) / (k * (k + 2)),
    "unit_norm": lambda k: (k**2 - 1) / (k**2 + 2),
    "gaussian": lambda k: 1 + 1 / k**2,
    "delta": lambda k: 0.0,
}


@pytest.mark.parametrize("k", [3, 5, 7])
@pytest.mark.parametrize("option", VARPHI)
def test_spectra_of_depthwise_filters(option, k):
    """J J^T of a circular depthwise filter has the eigenvalues |DFT f|^2; a torus of 2 k - 1 separates all shifts."""
    filters = initialized(conv(20_000, 20_000, k, groups=20_000), depthwise=option)[:, 0]
    eigenvalues = torch.fft.fft2(filters, s=(2 * k - 1, 2 * k - 1)).abs().square()
    phi = eigenvalues.mean().item()
    assert phi == pytest.approx(1, rel=0.02 if option == "gaussian" else 1e-12)
    varphi = eigenvalues.square().mean().item() - phi**2
    assert varphi == pytest.approx(VARPHI[option](k), rel=0.02, abs=1e-12)


@pytest.mark.parametrize(("in_channels", "out"), [(4, 4), (3, 8), (8, 3)])
def test_delta_convolutions_have_one_eigenvalue(in_channels, out):
    jacobian = circular_jacobian(initialized(nn.Conv2d(in_channels, out, 3), dense="delta"), 5)
    values = torch.linalg.svdvals(jacobian).square()
    torch.testing.assert_close(values, torch.full_like(values, max(1.0, out / in_channels)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_that_was_named_for_other_operators_does_not_matter(name):
    layer = conv(8, 8, 3)
    with use_backend(name):
        initialize(layer, "orthogonal")
        nasfast.orthogonalize_([weight := torch.empty(4, 6)])
    torch.testing.assert_close(weight @ weight.T, torch.eye(4))
    other = conv(8, 8, 3)
    initialize(other, "orthogonal")
    torch.testing.assert_close(layer.weight, other.weight)


def test_draws_are_those_of_the_name():
    """Weights of today's seeds stay what they are: draws row by row from the generator of ".weight"."""
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=tensor_generator(".weight", 3))  # noqa: E731
    (haar,) = reference.orthogonalize([draw(8, 27)])
    # up to rounding: the native operator draws by itself
    close = partial(torch.testing.assert_close, rtol=0, atol=4e-15)
    close(initialized(nn.Conv2d(3, 8, 3), 3), haar.reshape(8, 3, 3, 3))
    (filters,) = reference.orthogonalize([draw(5, 3, 3)])
    close(initialized(conv(5, 5, 3, groups=5), 3)[:, 0], filters / math.sqrt(3))
    close(initialized(nn.Linear(6, 4), 3, linear="gaussian"), draw(4, 6) / math.sqrt(6))
    close(initialized(nn.Linear(6, 4), 3, linear="small"), draw(4, 6) * 0.01)


def test_named_schemes_are_schemes_and_networks_take_either():
    space = tiny_space()
    for name, scheme in init.SCHEMES.items():
        by_name, by_scheme = (Supernet(space, init=i).state_dict() for i in (name, scheme))
        assert all(torch.equal(by_name[n], by_scheme[n]) for n in by_name)
    own = build(space, (0, 0, 0, 0), init=InitScheme(depthwise="delta"))
    assert own.blocks[0].depthwise.conv.weight.count_nonzero() == own.blocks[0].depthwise.conv.out_channels


ALIGNED = {"alignment": 0.5, "depthwise": "unit_norm"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depthwise": "per_fliter"}, "unknown depthwise='per_fliter'; did you mean 'per_filter'"),
        ({"pointwise": "delta"}, "unknown pointwise='delta'; valid: gaussian, haar"),
        ({"dense": None}, "unknown dense=None"),
        ({**ALIGNED, "alignment": 1.5}, "alignment must be from 0 to 1, got 1.5"),
        ({**ALIGNED, "linear_share": -0.1}, "linear_share must be from 0 to 1, got -0.1"),
        ({"alignment": 0.5}, "alignment needs pointwise='haar' and depthwise='unit_norm'"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        InitScheme(**options)


@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan])
@pytest.mark.parametrize("name", ["shift", "branch_scale"])
def test_wrong_beginnings_are_refused(name, value):
    for kind in (InitScheme, SupernetConfig):
        with pytest.raises(ValueError, match=f"{name} must be finite and not negative, got {value}"):
            kind(**{name: value})
