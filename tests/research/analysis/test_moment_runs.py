"""Runs of random networks, which repeat, continue and stop; the detectors on made-up curves; wrong settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nasfast.research.analysis.moments.detect import (
    detect,
    fit_line,
    fit_power_law,
)
from nasfast.research.analysis.moments.networks import (
    NetConfig,
    chunk_size,
    fields,
    gaussian,
    images,
    run,
    run_chunk,
    standardise,
)

SMALL = {"width": 24, "batch": 16, "depth": 12, "every": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "batch"},
        {"norm": "batch", "residual": 2},
        {"norm": "layer"},
        {"norm": "layer", "kernel": 3, "padding": "zero"},
        {"act": "tanh", "sigma_w": 1.5, "sigma_b": 0.1},
        {"kernel": 3, "act": "relu6", "padding": "reflective"},
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
    cfg = NetConfig(width=256, depth=2, batch=1024, every=1)
    source = gaussian(20)
    assert chunk_size(cfg, source) == 2
    whole = run(cfg, source, realisations=5)
    folder = tmp_path / "deep"
    run(cfg, source, realisations=4, folder=folder)
    computed = []

    def noted(*args, **kwargs):
        computed.append(list(args[2]))
        return run_chunk(*args, **kwargs)

    monkeypatch.setattr("nasfast.research.analysis.moments.networks.run_chunk", noted)
    done = []
    resumed = run(cfg, source, realisations=5, folder=folder, progress=done.append)
    assert computed == [[4]] and done == [2, 4, 5]
    for name in whole.values:
        np.testing.assert_array_equal(resumed.values[name], whole.values[name])
    run(cfg, source, realisations=2, seed=1, folder=folder)
    run(cfg.replace(eps=1e-4), source, realisations=2, folder=folder)
    run(cfg, gaussian(21), realisations=2, folder=folder)
    assert computed[1:] == [[0, 1], [0, 1], [0, 1]]
    file = next(folder.glob("*-4-5.npz"))
    for damage in (b"no arrays", file.read_bytes()[:-40]):
        file.write_bytes(damage)
        with pytest.raises(ValueError, match=r"-4-5.npz is damaged or no .npz file: remove or replace it"):
            run(cfg, source, realisations=5, folder=folder)


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
    x = standardise(fields(3, 16)(32, torch.Generator().manual_seed(0)))
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
    assert torch.isfinite(standardise(torch.ones(4, 2))).all()


L = np.arange(4.0, 201, 4)


def curves_of(**changes) -> dict[str, np.ndarray]:
    flat = {"logchi": np.zeros_like(L), "reff_signal": np.full_like(L, 10.0), "variance_share": np.full_like(L, 0.6)}
    return {**flat, "lognu2": np.zeros_like(L), **changes}


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
    assert verdict.evidence["rank"] == curves["reff_signal"][-1]


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
    assert (law.tau, law.c) == pytest.approx((0.5, 1.3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": 2}, "kernel must be odd, or 0 for fully connected, got 2"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"every": 300}, "every must be at most depth, got 300 and 200"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        NetConfig(**changes)
