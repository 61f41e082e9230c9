"""Signal and noise through random networks: the layers against torch's own derivatives, moments against known ones, the
theorems' closed forms, the detectors on made-up curves, and runs that repeat, continue and stop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.analysis.moments import (
    Draws,
    NetConfig,
    Pair,
    Run,
    act,
    add,
    batch_norm,
    conv,
    detect,
    dilution_bounds,
    effective_rank,
    energies,
    fields,
    fit_line,
    fit_power_law,
    gaussian,
    group_norm,
    images,
    power_law_of,
    propagate,
    rescale,
    run,
    run_chunk,
    shape,
    standardised,
    summarise,
)
from nasfast.analysis.moments.networks import chunk_size

R, B, C = 2, 6, 4
SHAPES = {"fc": (), "conv": (5, 5)}


def pair_of(kind: str, *, channels: int = C, seed: int = 0) -> Pair:
    x, dx = torch.randn(2, B, R, channels, *SHAPES[kind], generator=torch.Generator().manual_seed(seed)).double()
    return Pair.of(x, dx)


def weights(kind: str, out: int = 3, kernel: int = 3) -> Tensor:
    size = (kernel, kernel) if kind == "conv" else ()
    return torch.randn(R, out, C, *size, generator=torch.Generator().manual_seed(1)).double()


def per_realisation(pair: Pair, function) -> Pair:
    """What torch's own forward mode makes of the same function of (B, C, ...), for every realisation."""
    results = [
        torch.func.jvp(lambda x, r=r: function(x, r), (pair.x[:, r],), (pair.dx[:, r],)) for r in range(pair.x.shape[1])
    ]
    return Pair.of(*(torch.stack(tensors, 1) for tensors in zip(*results, strict=True)))


def detached_bn(x: Tensor, eps: float) -> Tensor:
    over = [d for d in range(x.ndim) if d != 1]
    variance, mean = torch.var_mean(x.detach(), over, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps)


def circular(x: Tensor, weight: Tensor, mode: str = "circular", stride: int = 1) -> Tensor:
    if weight.ndim == 2:
        return x @ weight.T
    pad = weight.shape[-1] // 2
    return F.conv2d(F.pad(x, (pad,) * 4, mode=mode), weight, stride=stride)


def assert_same(got: Pair, want: Pair) -> None:
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.dx * (got.log_scale[0] / 2).exp(), want.dx, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (lambda p: batch_norm(p, 1e-3), lambda x: detached_bn(x, 1e-3)),
        (lambda p: group_norm(p, 1e-3, 1), lambda x: F.group_norm(x, 1, eps=1e-3)),
        (lambda p: group_norm(p, 1e-3, 2), lambda x: F.group_norm(x, 2, eps=1e-3)),
        (lambda p: act(p, "relu"), torch.relu),
        (lambda p: act(p, "relu6"), F.relu6),
        (lambda p: act(p, "tanh"), torch.tanh),
        (lambda p: act(p, "identity"), lambda x: 1 * x),
        (lambda p: add(p, act(p, "tanh")), lambda x: x + torch.tanh(x)),
        (rescale, lambda x: 1 * x),
    ],
    ids=["batch", "layer", "group", "relu", "relu6", "tanh", "identity", "add", "rescale"],
)
def test_layers_against_forward_mode(kind, layer, function):
    pair = pair_of(kind)
    if layer is rescale:
        pair = Pair(pair.v.clone(), pair.log_scale)
    want = per_realisation(pair, lambda x, r: function(x))
    got = layer(pair)
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    noise = got.dx * got.channels((got.log_scale / 2).exp()[:, None])
    torch.testing.assert_close(noise, want.dx, rtol=1e-10, atol=1e-12)


def test_instance_norm():
    pair = pair_of("conv")
    want = per_realisation(pair, lambda x, r: F.instance_norm(x, eps=1e-3))
    assert_same(group_norm(pair, 1e-3, C), want)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("padding", "mode"), [("periodic", "circular"), ("zero", "constant"), ("reflective", "reflect")]
)
def test_convolutions(padding, mode, stride):
    pair, weight = pair_of("conv"), weights("conv")
    bias = torch.randn(R, 3).double()
    want = per_realisation(pair, lambda x, r: circular(x, weight[r], mode, stride) + bias[r].reshape(-1, 1, 1))
    assert_same(conv(pair, weight, bias, stride=stride, padding=padding), want)


def test_shifted_borders_are_a_translation():
    pair, weight = pair_of("conv"), weights("conv")
    centred, shifted = conv(pair, weight), conv(pair, weight, padding="shifted")
    torch.testing.assert_close(shifted.v, centred.v.roll((1, 1), (-2, -1)))


def test_affine_normalisation():
    pair, gamma, shift = pair_of("conv"), torch.randn(R, C).double(), torch.randn(R, C).double()

    def scaled(x: Tensor, r: int) -> Tensor:
        return x * gamma[r].reshape(-1, 1, 1) + shift[r].reshape(-1, 1, 1)

    want = per_realisation(pair, lambda x, r: scaled(detached_bn(x, 1e-3), r))
    assert_same(batch_norm(pair, 1e-3, gamma, shift), want)
    want = per_realisation(pair, lambda x, r: scaled(F.group_norm(x, 2, eps=1e-3), r))
    assert_same(group_norm(pair, 1e-3, 2, gamma, shift), want)


class Noted(Draws):
    """Draws whose weights are kept, to build the same network with torch alone."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.kept: list[Tensor] = []

    def normal(self, *size: int, std: float = 1.0) -> Tensor:
        self.kept.append(super().normal(*size, std=std))
        return self.kept[-1]


@pytest.mark.parametrize("residual", [0, 2])
@pytest.mark.parametrize("kernel", [0, 3])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_networks_against_forward_mode_and_differences(residual, kernel, norm):
    """Depth 5, the whole function at once: places, order of layers and scales, as torch's jvp of the same network."""
    cfg = NetConfig(norm=norm, residual=residual, kernel=kernel, width=5, depth=5, batch=B, every=1, act="tanh")
    draws = Noted(0, range(R), torch.float64)
    start = draws.inputs(fields(2, 8) if kernel else gaussian(6), B)
    *_, last = propagate(cfg, draws, start)
    got = last["sum" if residual else "act"]

    def network(x: Tensor, r: int) -> Tensor:
        layers = iter(draws.kept)
        x = circular(x, next(layers)[r], stride=2 if kernel else 1)
        normal = (lambda y: detached_bn(y, cfg.eps)) if norm == "batch" else (lambda y: y)
        for _ in range(cfg.depth):
            y = x
            for _ in range(residual or 1):
                if residual:
                    y = circular(torch.tanh(normal(y)), next(layers)[r])
                else:
                    y = torch.tanh(normal(circular(y, next(layers)[r])))
            x = x + y if residual else y
        return x

    want = per_realisation(start, network)
    torch.testing.assert_close(got.x, want.x, rtol=1e-10, atol=1e-12)
    noise = got.dx * got.channels((got.log_scale / 2).exp()[:, None])
    torch.testing.assert_close(noise, want.dx, rtol=1e-10, atol=1e-12)
    if norm == "none":
        step = 1e-6
        moved = [network(start.x[:, 0] + s * start.dx[:, 0], 0) for s in (step, -step)]
        torch.testing.assert_close((moved[0] - moved[1]) / (2 * step), want.dx[:, 0], rtol=1e-5, atol=1e-8)


def test_moments_of_known_signals():
    x = torch.tensor([[1.0, 4.0], [-1.0, 4.0], [3.0, 4.0], [-3.0, 4.0]]).double()[:, None]
    pair = Pair(torch.stack((x, 2 * x)), torch.tensor([math.log(9.0)]).double())
    found = {k: float(v) for k, v in energies(pair).items()}
    assert found["log_nu2_signal"] == pytest.approx(math.log((5 + 16) / 2))
    assert found["log_mu2_signal"] == pytest.approx(math.log(5 / 2))
    assert found["log_mu2_noise"] == pytest.approx(math.log(9 * 4 * (5 + 16) / 2))
    found = {k: float(v) for k, v in shape(pair).items()}
    assert found["mu4_signal"] == pytest.approx((41 + 0) / 2)
    assert found["nu1_abs_signal"] == pytest.approx((2 + 4) / 2)
    assert found["nu1_abs_squared_signal"] == pytest.approx((4 + 16) / 2)
    # the second channel is always on
    assert found["pseudo_linear"] == pytest.approx((0.5 + 0) / 2)


@pytest.mark.parametrize(("rows", "columns"), [(40, 7), (7, 40)])
def test_effective_rank_of_a_known_spectrum(rows, columns):
    values = torch.tensor([4.0, 2.0, 1.0, 1.0]).double()
    left = torch.linalg.qr(torch.cat((torch.ones(rows, 1), torch.randn(rows, 4)), 1).double())[0][:, 1:]
    right = torch.linalg.qr(torch.randn(columns, 4).double())[0]
    # singular values are roots; columns of `left` have mean 0, and a constant vector is taken off
    x = left @ torch.diag(values.sqrt()) @ right.T + torch.randn(columns)
    assert float(effective_rank(x[:, None])) == pytest.approx(8 / 4, rel=1e-6)
    images = x.reshape(rows, 1, columns).repeat(1, 2, 1)
    images[:, 1] = 0
    found = effective_rank(images)
    assert float(found[0]) == pytest.approx(2, rel=1e-6) and math.isnan(found[1])


def test_rank_counts_positions_as_samples():
    x = torch.randn(3, 2, 4, 5, 5).double()
    spectra = [torch.linalg.eigvalsh(torch.cov(x[:, r].movedim(1, 0).flatten(1))) for r in range(2)]
    torch.testing.assert_close(effective_rank(x), torch.stack([values.sum() / values[-1] for values in spectra]))


def test_chi_is_the_gradient_relative_to_that_of_a_rescaling():
    """chi = [E |J|_F^2 / dim]^{1/2} / [mu_2(y) / mu_2(x)]^{1/2} (spec section 2), with the exact Jacobian."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()).double()
    x = torch.randn(8, 12).double()
    jacobians = torch.func.vmap(torch.func.jacrev(net))(x)
    y = net(x).detach()
    frobenius = float(jacobians.detach().square().sum((1, 2)).mean() / 16)
    expected = math.sqrt(frobenius / float(y.var(0, correction=0).mean() / x.var(0, correction=0).mean()))
    found = []
    for _ in range(300):
        dx = torch.randn(8, 12).double()
        pair = conv(Pair.of(x[:, None], dx[:, None]), net[0].weight[None].detach(), net[0].bias[None].detach())
        pair = conv(act(pair, "relu"), net[2].weight[None].detach(), net[2].bias[None].detach())
        end, start = energies(act(pair, "relu")), energies(Pair.of(x[:, None], dx[:, None]))
        found.append(float((end["log_mu2_noise"] - end["log_mu2_signal"] + start["log_mu2_signal"]).exp()))
    assert math.sqrt(np.mean(found)) == pytest.approx(expected, rel=0.05)


def one_layer(norm: str, *, draws: int, channels: int = 24, batch: int = 48) -> dict[str, float]:
    """One ReLU layer behind a fixed signal and noise of uneven spectrum: averages over draws of its weights."""
    generator = torch.Generator().manual_seed(5)
    spectrum = torch.linspace(0.3, 2, channels)
    x = (torch.randn(batch, channels, generator=generator) * spectrum).relu().double()
    dx = torch.randn(batch, channels, generator=generator).double()
    weight = torch.randn(draws, 256, channels, generator=generator).double() * math.sqrt(2 / channels)
    pair = Pair.of(*(t[:, None].expand(-1, draws, -1) for t in (x, dx)))
    y = conv(pair, weight)
    z = batch_norm(y, 0.0) if norm == "batch" else y
    # chi^2 from expectations over weights
    places = {"in": pair, "z": z, "out": act(z, "relu")}
    mean = {name: {k: float(v.exp().mean()) for k, v in energies(p).items()} for name, p in places.items()}
    chi2 = {name: found["log_mu2_noise"] / found["log_mu2_signal"] for name, found in mean.items()}
    plus, minus = (t.mean(0) for t in (y.x.clamp_min(0), (-y.x).clamp_min(0)))
    ratio = float((y.dx.square().mean(0) / y.x.var(0, correction=0)).mean())
    return {
        "inc": math.sqrt(chi2["out"] / chi2["in"]),
        "vanilla": (1 - float((plus * minus).mean()) / mean["in"]["log_mu2_signal"]) ** -0.5,
        "bn": math.sqrt(chi2["z"] / chi2["in"]),
        "bn_formula": math.sqrt(ratio / chi2["in"]),
        "phi": math.sqrt(chi2["out"] / chi2["z"]),
        "phi_formula": (1 - float(shape(z)["nu1_abs_squared_signal"].mean()) / 2) ** -0.5,
    }


def test_theorem_2():
    found = one_layer("none", draws=400)
    assert found["inc"] == pytest.approx(found["vanilla"], rel=5e-3)
    assert 1 < found["inc"] < math.sqrt(2)


def test_theorem_3():
    found = one_layer("batch", draws=400)
    assert found["bn"] == pytest.approx(found["bn_formula"], rel=5e-3)
    assert found["phi"] == pytest.approx(found["phi_formula"], rel=5e-3)
    assert found["bn"] > 1 and 1 < found["phi"] < math.sqrt(2)


def test_theorem_1_of_a_rank_one_signal():
    """All inputs alike: log nu_2 drifts by 5 / (2 N) and diffuses with variance 5 / N per layer."""
    width, depth = 64, 60
    cfg = NetConfig(width=width, depth=depth, batch=2, every=depth)
    draws = Draws(0, range(1200))
    one = torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(0))
    pair = Pair.of(*(one.expand(1, 1200, 8) for _ in range(2)))
    first = None
    for places in propagate(cfg, draws, pair):
        first = energies(places["input"])["log_nu2_signal"] if first is None else first
    logs = energies(places["act"])["log_nu2_signal"] - first
    assert float(logs.mean()) == pytest.approx(-2.5 * depth / width, rel=0.1)
    assert float(logs.std()) == pytest.approx(math.sqrt(5 * depth / width), rel=0.08)


SMALL = {"width": 24, "batch": 16, "depth": 12, "every": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "batch"},
        {"norm": "batch", "residual": 2},
        {"norm": "layer"},
        {"norm": "instance", "kernel": 3},
        {"norm": "group", "kernel": 3, "padding": "zero"},
        {"act": "tanh", "sigma_w": 1.5, "sigma_b": 0.1},
        {"init": "uniform", "norm": "batch", "residual": 1},
        {"init": "orthogonal", "act": "identity"},
        {"init": "orthogonal", "kernel": 3, "act": "relu6", "padding": "reflective"},
        {"init": "uniform"},
    ],
    ids=str,
)
def test_every_family_gives_finite_curves_that_repeat(changes):
    cfg = NetConfig(**{**SMALL, **changes})
    source = fields(3, 8) if cfg.kernel else gaussian(20)
    found = run(cfg, source, realisations=2, seed=3)
    curves = found.curves()
    assert cfg.records == [3, 6, 9, 12]
    for name, values in curves.items():
        assert values.shape == (2, 4) and np.isfinite(values).all(), name
    if "inc_bn" in curves:
        np.testing.assert_allclose(curves["inc_bn"] * curves["inc_phi"], curves["inc"], rtol=1e-12)
    assert (curves["reff_signal"] >= 1).all() and (curves["reff_noise"] >= 1).all()
    again = run(cfg, source, realisations=2, seed=3)
    for name in found.values:
        np.testing.assert_array_equal(found.values[name], again.values[name])
    assert not np.allclose(run(cfg, source, realisations=2, seed=4).curves()["logchi"], curves["logchi"])


def test_increments_multiply_to_chi():
    found = run(NetConfig(**{**SMALL, "every": 1}), gaussian(20), realisations=3)
    curves, first = found.curves(), found.log_chi("input")[:, 0]
    np.testing.assert_allclose(np.log(curves["inc"]).sum(1) + first, curves["logchi"][:, -1], rtol=1e-9)


def test_an_orthogonal_linear_network_is_neutral():
    cfg = NetConfig(init="orthogonal", act="identity", width=24, depth=6, every=6, dtype="float64")
    found = run(cfg, gaussian(48), realisations=2)
    np.testing.assert_allclose(found.log_chi("act"), found.log_chi("input"), atol=1e-6)


@pytest.mark.parametrize("kernel", [0, 3])
def test_uniform_weights_have_the_variance_of_hes(kernel):
    draws = Draws(0, range(2))
    weight, bias = draws.layer(NetConfig(init="uniform", kernel=kernel, width=400), 8)
    rows = weight.flatten(2)
    assert float(rows.square().sum(2).mean()) == pytest.approx(2, rel=0.03)
    radius = math.sqrt(2 * (rows.shape[2] + 3) / rows.shape[2])
    assert float((rows.square().sum(2) + bias.square()).max()) <= radius**2 * (1 + 1e-5)
    gamma, shift = draws.affine(NetConfig(init="uniform", width=4000))
    assert float((gamma.square() + shift.square()).mean()) == pytest.approx(1, rel=0.03)


def test_a_network_does_not_depend_on_its_neighbours():
    cfg = NetConfig(norm="batch", dtype="float64", **SMALL)
    both, alone = run_chunk(cfg, gaussian(20), [4, 7]), run_chunk(cfg, gaussian(20), [7])
    for name in both:
        np.testing.assert_allclose(both[name][1:], alone[name], rtol=1e-9, atol=1e-9)


def test_float32_stays_near_float64():
    for changes in ({}, {"norm": "batch"}, {"norm": "batch", "residual": 2}):
        runs = [
            run(NetConfig(**SMALL, **changes, dtype=d), gaussian(20), realisations=2) for d in ("float32", "float64")
        ]
        a, b = (r.curves()["logchi"] for r in runs)
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_runs_continue_from_their_file(tmp_path, monkeypatch):
    cfg = NetConfig(width=256, depth=4, batch=1024, every=2)
    source = gaussian(20)
    assert chunk_size(cfg, source) == 2
    whole = run(cfg, source, realisations=5)
    file = tmp_path / "deep" / "results.jsonl"
    run(cfg, source, realisations=4, file=file)
    # a kill leaves half a line
    with open(file, "a") as out:
        out.write('{"key": "x", "ids": [4')
    computed = []

    def noted(*args, **kwargs):
        computed.append(list(args[2]))
        return run_chunk(*args, **kwargs)

    monkeypatch.setattr("nasfast.analysis.moments.networks.run_chunk", noted)
    done = []
    resumed = run(cfg, source, realisations=5, file=file, progress=done.append)
    assert computed == [[4]] and done == [2, 4, 5]
    for name in whole.values:
        np.testing.assert_array_equal(resumed.values[name], whole.values[name])
    run(cfg, source, realisations=5, file=file)
    assert computed == [[4]], "the line behind the torn one was lost"
    run(cfg, source, realisations=2, seed=1, file=file)
    run(cfg.replace(eps=1e-4), source, realisations=2, file=file)
    run(cfg, gaussian(21), realisations=2, file=file)
    assert computed[1:] == [[0, 1], [0, 1], [0, 1]]


def test_chunks_are_bounded():
    assert chunk_size(NetConfig(width=512, batch=64), gaussian(20)) == 16
    assert chunk_size(NetConfig(kernel=3, width=64, batch=16), fields(3, 16)) == 8
    assert chunk_size(NetConfig(kernel=3, width=512, batch=64), fields(3, 32)) == 1


def test_a_lost_signal_is_flagged():
    """Ordered phase of tanh: the signal shrinks until its rounding would be measured."""
    cfg = NetConfig(act="tanh", sigma_w=0.5, sigma_b=0.5, width=32, depth=60, every=2, batch=16)
    found = run(cfg, gaussian(20), realisations=2)
    curves = found.curves()
    assert np.isnan(curves["logchi"][:, -1]).all() and np.isfinite(curves["logchi"][:, 0]).all()
    known = curves["variance_share"][np.isfinite(curves["variance_share"])]
    assert known.min() > 1e-10
    assert detect(found.depth, curves).names[0] == "zero-dimensional signal"


def test_inputs():
    x = standardised(fields(3, 16)(32, torch.Generator().manual_seed(0)))
    assert x.shape == (32, 3, 16, 16)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.var((0, 2, 3), correction=0), torch.ones(3))
    power = torch.fft.rfft2(x).abs().square().mean((0, 1))
    # amplitude 1 / f: four times the frequency, a sixteenth of the power
    assert float(power[0, 1] / power[0, 4]) == pytest.approx(16, rel=0.5)
    pixels = torch.randint(0, 256, (10, 3, 4, 4), dtype=torch.uint8)
    drawn = images(pixels, flat=True)(10, torch.Generator().manual_seed(0))
    assert drawn.shape == (10, 48) and sorted(drawn.sum(1).tolist()) == sorted(pixels.flatten(1).sum(1).tolist())
    with pytest.raises(ValueError, match="a batch of 11 needs 11 images, got 10"):
        images(pixels)(11, torch.Generator())
    # a pixel that never changes has no deviation
    assert torch.isfinite(standardised(torch.ones(4, 2))).all()


L = np.arange(4.0, 201, 4)


def curves_of(**changes) -> dict[str, np.ndarray]:
    flat = {"logchi": np.zeros_like(L), "reff_signal": np.full_like(L, 10.0), "variance_share": np.full_like(L, 0.6)}
    return {**flat, "lognu2": np.zeros_like(L), "logmu2_noise": np.zeros_like(L), **changes}


@pytest.mark.parametrize(
    ("curves", "names"),
    [
        (curves_of(logchi=0.2 * L), ("exploding sensitivity",)),
        (curves_of(logchi=0.5 * np.log(L) + 0.1), ("well behaved",)),
        (curves_of(logchi=0.5 * np.log(L), reff_signal=np.full_like(L, 2.0)), ("undecided",)),
        (curves_of(logchi=0.3 * np.sqrt(L)), ("undecided",)),
        (curves_of(logchi=0.01 * L), ("undecided",)),
        (curves_of(reff_signal=1 + 5 / L), ("one-dimensional signal",)),
        (curves_of(reff_signal=1.1 + 1e-3 * L), ("undecided",)),
        (curves_of(variance_share=np.exp(-0.05 * L)), ("zero-dimensional signal",)),
        (
            curves_of(logchi=0.2 * L, variance_share=np.exp(-0.05 * L)),
            ("zero-dimensional signal", "exploding sensitivity"),
        ),
        (curves_of(logchi=0.5 * np.log(L), lognu2=0.3 * L), ("well behaved", "scaling")),
        (curves_of(logchi=0.5 * np.log(L), lognu2=12 * np.log(L)), ("well behaved",)),
    ],
)
def test_detectors(curves, names):
    verdict = detect(L, curves)
    assert verdict.names == names
    assert str(verdict) == ", ".join(names)
    assert verdict.to_dict()["evidence"]["rank"] == curves["reff_signal"][-1]


def test_detectors_average_over_realisations_and_leave_out_what_is_lost():
    curves = {k: np.stack((v, v)) for k, v in curves_of(logchi=0.2 * L).items()}
    curves["logchi"][0] += 1
    curves["logchi"][:, -5:] = np.nan
    verdict = detect(L, curves)
    assert verdict.names == ("exploding sensitivity",)
    assert verdict.evidence["log_chi"] == pytest.approx(0.2 * L[-6] + 0.5)
    few = {k: v[:3] for k, v in curves_of(logchi=0.2 * L).items()}
    assert detect(L[:3], few).names == ("undecided",)
    with pytest.raises(ValueError, match="no record with a signal"):
        detect(L, curves_of(logchi=np.nan * L))


def test_fits():
    line = fit_line(L, 3 + 0.5 * L)
    assert (line.slope, line.intercept, line.r2) == pytest.approx((0.5, 3, 1))
    assert math.isnan(fit_line(L[:1], L[:1]).slope)
    law = fit_power_law(L, 1.3 * L**0.5, np.full_like(L, 2 ** (1 / 4)), 2)
    assert (law.tau, law.c) == pytest.approx((0.5, 1.3)) and law.error < 1e-9


def test_summaries():
    found = summarise({"x": np.array([[1.0, np.nan], [3.0, np.nan], [5.0, 2.0]])})
    np.testing.assert_allclose(found["x_mean"], [3, 2])
    np.testing.assert_allclose(found["x_std"], [math.sqrt(8 / 3), 0])
    np.testing.assert_allclose(found["x_error"], [math.sqrt(8 / 3 / 2), 0])
    assert found["x_p16"][0] < 2 < found["x_p84"][0]


def test_the_three_families_behave_as_the_paper_says():
    """Small versions of the experiments: bounded increments, a falling rank, exponential, power law, dilution."""
    base = NetConfig(width=64, batch=32, depth=100, every=4)
    vanilla, plain, resnet = (
        run(base.replace(**changes), gaussian(96), realisations=4)
        for changes in ({}, {"norm": "batch"}, {"norm": "batch", "residual": 2})
    )
    curves = vanilla.curves()
    assert curves["reff_signal"][:, -1].mean() < 1.5 < curves["reff_signal"][:, 0].mean()
    assert 0.9 < curves["inc"].mean(0).min() and curves["inc"].mean(0).max() < math.sqrt(2)
    verdict = detect(plain.depth, plain.curves())
    assert verdict.names == ("exploding sensitivity",) and 0.15 < verdict.evidence["slope"] < 0.25
    verdict = detect(resnet.depth, resnet.curves())
    assert verdict.evidence["exponent_r2"] > verdict.evidence["exponent_r2_against_l"]
    assert verdict.evidence["exponent"] == pytest.approx(power_law_of(resnet).tau, abs=0.2)
    low, mean, high = dilution_bounds(resnet)
    assert (mean > 0.98 * low).all() and (mean < 1.02 * high).all() and (low < high).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": 2}, "kernel must be odd, or 0 for fully connected, got 2"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"every": 300}, "every must be at most depth, got 300 and 200"),
        ({"init": "uniform", "sigma_b": 0.1}, "sigma_b must be 0 with init='uniform'"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        NetConfig(**changes)


def test_groups_must_divide():
    with pytest.raises(ValueError, match="4 channels cannot be divided into 3 groups"):
        group_norm(pair_of("fc"), 1e-3, 3)


def test_chunks_do_not_mix_up_their_realisations():
    cfg = NetConfig(**SMALL)
    parts = [run_chunk(cfg, gaussian(20), [r])["log_mu2_noise_act"] for r in range(3)]
    whole = run(cfg, gaussian(20), realisations=3)
    assert isinstance(whole, Run) and whole.realisations == 3
    np.testing.assert_allclose(whole.values["log_mu2_noise_act"], np.concatenate(parts), rtol=1e-4, atol=1e-4)
