"""The isometry study: its closed forms, what it measures of candidates, its claims and its command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny import tiny_space
from torch import nn

from nasfast.cli.main import main
from nasfast.research.analysis import jacobian
from nasfast.research.studies import closed_forms, isometry
from nasfast.research.studies.closed_forms import block_marks, circular_conv_moments, convolution_marks
from nasfast.research.studies.commands import StudyConfig
from nasfast.research.studies.isometry import Measured, Row, measure_supernet
from nasfast.research.studies.notebook import Notebook
from nasfast.spaces import Block, Stage, mobilenet_v2
from nasfast.supernet import Supernet


@pytest.fixture
def small(monkeypatch):
    for name, value in (("BATCH", 16), ("SAMPLES", 2), ("PROBES", 4), ("LANCZOS_STEPS", 3), ("PATHS", 3)):
        monkeypatch.setattr(isometry, name, value)


def notebook() -> Notebook:
    return Notebook("n", StudyConfig())


def test_the_marks_of_blocks_are_met():
    notes = notebook()
    block_marks("relu", notes)
    assert notes.missed == [] and len(notes.marks) == 5


@pytest.mark.parametrize(
    ("conv", "size"),
    [
        (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), 6),
        (nn.Conv2d(4, 6, 3, padding=1, bias=False), 5),
        (nn.Conv2d(6, 4, 1, bias=False), 3),
        (nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), 5),
    ],
    ids=["depthwise", "dense", "pointwise", "grouped"],
)
def test_moments_by_fourier_transform_are_those_of_the_jacobian(conv, size):
    firsts, seconds = circular_conv_moments(conv)
    found = jacobian.isometry(conv, torch.randn(1, conv.in_channels, size, size), samples=1, circular=True)
    assert (firsts.mean(), seconds.mean()) == pytest.approx((found.phi, found.varphi + found.phi**2), rel=1e-9)


def test_closed_forms_of_a_whole_space():
    """All kinds of convolutions of the first stage of mobilenet_v2."""
    space = mobilenet_v2(resolution=32)
    space = space.replace(stages=space.stages[:3], head=())
    for scheme in ("orthogonal", "gaussian"):
        notes = notebook()
        kinds = convolution_marks(Supernet(space, init=scheme, fused=False), scheme, scheme, notes)
        assert {"depthwise 3 x 3", "depthwise 5 x 5", "depthwise 7 x 7", "pointwise, projection"} <= set(kinds)
        assert notes.missed == [] and len(notes.marks) > 8
    assert (
        convolution_marks(Supernet(space, fused=False), "s", "orthogonal", notebook())["pointwise, projection"][2]
        < 1e-6
    )


def test_a_scheme_that_is_not_what_it_says_misses_its_marks():
    notes = notebook()
    convolution_marks(Supernet(tiny_space(), init="gaussian", fused=False), "wrong", "orthogonal", notes)
    assert notes.missed


def test_relative_gains():
    gains = [closed_forms.relative_gain(act) for act in ("identity", "tanh", "relu", "relu6")]
    assert gains == pytest.approx([1, 1.1778, 1 / (1 - 1 / np.pi), 1 / (1 - 1 / np.pi)], rel=1e-4)


def test_candidates_and_spreads(small):
    net = Supernet(tiny_space(resolution=8), fused=False, layer_indicators=False)
    rows, spreads = measure_supernet(net, "n")
    assert [(row.layer, row.name) for row in rows] == [(i, n) for i in range(4) for n in ("k3 e2", "k5 e1", "k3 e3")]
    assert [len(spreads[indicator]) for indicator in (True, False)] == [4, 4]
    assert all((layer["f_phi"] is not None) == indicator for indicator in spreads for layer in spreads[indicator])
    for row in rows:
        # layers 0 and 2 are reductions, without a skip connection
        assert (row.module is None) == (row.layer in (0, 2))
        assert row.acts == (1 if row.name == "k5 e1" else 2)
        assert row.var_in == pytest.approx(1, abs=0.2) and row.var_out == pytest.approx(1, abs=0.01)
        assert row.gain == pytest.approx(row.branch.phi * row.var_in / row.var_out)
        assert row.histogram.sum() == pytest.approx(1, abs=0.2)
        if row.module is not None:
            # J = I + J_branch, whose trace is small beside its width
            assert row.module.phi == pytest.approx(1 + row.branch.phi, rel=0.5)


def test_shuffle_units_and_identities(small):
    """A stride-1 unit has a branch on half of its channels; an identity is no candidate to measure."""
    layers = tuple(Stage(16, 2, 2, (Block("shuffle", 3), Block("shuffle_xception", 3), Block("identity"))) for _ in "a")
    net = Supernet(tiny_space(stages=layers, activation="relu"), fused=False)
    rows, spreads = measure_supernet(net, "n")
    first, second = ([row for row in rows if row.layer == i] for i in (0, 1))
    assert [row.name for row in first] == ["k3", "xception", "identity"]
    assert [row.name for row in second] == ["k3", "xception"]
    assert [row.acts for row in rows] == [2, 3, 0, 2, 3]
    assert first[0].branch.w_in == 8 * 8 * 8 and first[0].module.w_out == 16 * 4 * 4
    assert second[0].branch.w_in == second[0].branch.w_out == 8 * 4 * 4
    # half of the channels bypass
    assert second[0].module.phi == pytest.approx((1 + second[0].branch.phi) / 2, rel=0.3)
    assert len(spreads[True]) == 2


def made_up(phi: float, varphi: float, spread: float, std: list[float]) -> Measured:
    """A setting with one candidate in each layer, and equal spreads in all."""
    branch = isometry.isometry(torch.nn.Linear(2, 2), torch.randn(4, 2), samples=1)
    branch = type(branch)(**{**vars(branch), "phi": phi, "varphi": varphi})
    rows = [Row(layer, "a", branch, None, 1.0, 1.0, 2, np.zeros(50)) for layer in range(8)]
    layer = dict.fromkeys(isometry.SPREADS, spread)
    return Measured(rows, {i: [layer] * 8 for i in (True, False)}, {i: {"std": std} for i in (True, False)}, {})


def test_claims_follow_from_the_numbers(capsys):
    flat, rising = [0.1] * 8, list(0.1 * np.sqrt(np.arange(1, 9)))
    good, bad = made_up(1.05, 0.05, 0.01, flat), made_up(1.05, 2.0, 0.02, rising)
    found = {"orthogonal, tanh": good, "orthogonal, relu": good, "gaussian, relu": bad}
    isometry._claims("relu", found, notebook())
    lines = capsys.readouterr().out.splitlines()
    assert [("Verdict: holds." in line) for line in lines] == [True] * 7
    isometry._claims("relu", {**found, "orthogonal, relu": bad}, notebook())
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.split("Verdict: ")[1].split(".")[0] for line in lines]
    assert verdicts == ["holds", "in part: tanh", "holds", *["does not hold"] * 4]
    assert "phi 1.05, varphi 2.00" in lines[1] and "Theory: it assumes tanh" in lines[1]
    assert "0.0200 against 0.0200" in lines[4] and "growing by 2.27" in lines[6]


@pytest.mark.slow
def test_the_command(small, tmp_path, capsys):
    tiny_space(resolution=8).save(tmp_path / "tiny.yaml")
    assert main(["isometry", "--space", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path)]) == 0
    form = json.loads((tmp_path / "isometry.json").read_text())
    assert len(form["marks"]) > 12 and all(mark["passed"] for mark in form["marks"])
    assert len(form["tables"]["branches with standard errors, and whole modules"]) == 1 + 3 * 12
    assert sum(line.startswith("Claim: ") for line in form["text"]) == 7
    page = (tmp_path / "isometry.html").read_text()
    assert page.count("<figure>") == 4 and "http" not in page.replace("http-equiv", "")
