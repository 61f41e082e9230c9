"""The isometry study: what it measures, its files, and the command with its exit status."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import tiny_space
from torch import nn

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.research.studies.inputs import reduced_space
from nasfast.research.studies.isometry.config import IsometryConfig
from nasfast.research.studies.isometry.marks import block_marks, measure_convolutions
from nasfast.research.studies.isometry.measure import measure_supernet
from nasfast.research.studies.moments.config import ModuleConfig
from nasfast.research.studies.run import run_study
from nasfast.spaces import Block, Stage, mobilenet_v2
from nasfast.supernet import Supernet

SMALL = {"batch": 16, "samples": 2, "probes": 4, "lanczos_steps": 3, "paths": 3}
SETTINGS = ("orthogonal, tanh", "orthogonal, relu6", "gaussian, relu6")


def two_layers() -> nn.Module:
    """A user's factory."""
    features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Sequential(nn.BatchNorm2d(4), nn.Tanh()))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(4 * 36, 3))


def no_module() -> int:
    return 3


def linear_of_width(width: int) -> nn.Module:
    return nn.Linear(width, 2)


class TwoInputs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x, y):
        return x + y


def nan_weights() -> nn.Module:
    layer = nn.Linear(4, 2)
    nn.init.constant_(layer.weight, math.nan)
    return layer


INSTANCE = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


@pytest.fixture(scope="module")
def space(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("space") / "tiny.yaml"
    tiny_space(resolution=8).save(path)
    return str(path)


@pytest.fixture(scope="module")
def report(space):
    return run_study("isometry", IsometryConfig(space=space, **SMALL))


@pytest.mark.slow
def test_every_candidate_under_every_setting(report):
    assert report.data["settings"] == list(SETTINGS)
    places = {(row.setting, row.layer, row.name) for row in report.data["rows"]}
    assert places == {(s, i, n) for s in SETTINGS for i in range(4) for n in ("k3 e2", "k5 e1", "k3 e3")}
    for row in report.data["rows"]:
        # layers 0 and 2 are reductions, without a skip connection
        assert (row.module is None) == (row.layer in (0, 2))
        assert row.acts == (1 if row.name == "k5 e1" else 2)
        assert row.var_in == pytest.approx(1, abs=0.2) and row.var_out == pytest.approx(1, abs=0.01)
        assert row.gain == pytest.approx(row.branch.phi * row.var_in / row.var_out)
        assert sum(row.histogram) == pytest.approx(1, abs=0.2)
        if row.module is not None:
            # J = I + J_branch, whose trace is small beside its width
            assert row.module.phi == pytest.approx(1 + row.branch.phi, rel=0.5)


def test_fairness_depth_convolutions_and_marks(report):
    kinds = {(f["setting"], f["layer"], f["block_indicator"]) for f in report.data["fairness"]}
    assert kinds == {(s, i, bn) for s in SETTINGS for i in range(4) for bn in (True, False)}
    assert all((f["f_phi"] is not None) == f["block_indicator"] for f in report.data["fairness"])
    assert [(d["setting"], d["block_indicator"], len(d["std"])) for d in report.data["depth"]] == [
        (s, bn, 4) for s in SETTINGS for bn in (True, False)
    ]
    orthogonal = {c["kind"]: c for c in report.data["convolutions"] if c["setting"] == "orthogonal, relu6"}
    assert orthogonal["pointwise, projection"]["varphi"] == pytest.approx(0, abs=1e-6)
    assert orthogonal["pointwise, expansion x 3"]["varphi"] == pytest.approx(2, abs=1e-6)
    assert not [mark.name for mark in report.missed]
    assert len(report.claims) == 7
    values = [
        f["f_iso"] for f in report.data["fairness"] if (f["setting"], f["block_indicator"]) == (SETTINGS[1], False)
    ]
    mean = next(
        m for m in report.data["fairness_means"] if (m["setting"], m["block_indicator"]) == (SETTINGS[1], False)
    )
    assert mean["f_iso"] == pytest.approx(sum(values) / 4) and mean["f_phi"] is None


@pytest.mark.slow
def test_files(report, tmp_path):
    page = report.save(tmp_path / "deep")
    assert page == tmp_path / "deep" / "isometry.html"
    record = json.loads((tmp_path / "deep" / "isometry.json").read_text())
    assert record == json.loads(json.dumps(report.to_dict(), allow_nan=False))
    text = page.read_text()
    assert text.count("<figure>") == 5
    assert "http" not in text.replace("http-equiv", "")
    for title in ("What the paper says", "singular values", "fairness with depth", ">pass marks<"):
        assert title in text


def test_default_resolution():
    spaces = (("mobilenet_v2", None), ("nas_bench_macro", None), ("mobilenet_v2", 96))
    assert [reduced_space(*space, "isometry").resolution for space in spaces] == [64, 32, 96]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 9, "batch": 8}, "samples must be at most batch"),
        ({"inputs": "red"}, "allowed: 'white', 'propagated'"),
        ({"module": "tests"}, "must be package.module:factory"),
        ({"module": "no_such_package:f"}, "cannot import it: .*'no_such_package'"),
        ({"module": "json:no_such"}, "cannot import it: .*'no_such'"),
        ({"module": "json:dumps", "input": "3,x"}, "input must be positive integers"),
        ({"module": f"{__name__}:no_module", "input": "2,6,6"}, "must return an nn.Module, got int"),
        (
            {"module": f"{__name__}:linear_of_width"},
            "linear_of_width': making it without arguments failed: TypeError.*'width'",
        ),
        ({"module": f"{__name__}:TwoInputs", "input": "4"}, "TwoInputs', input 4, .*cannot take x .*TypeError.*'y'"),
        ({"module": f"{__name__}:nan_weights", "input": "4"}, "nan_weights', input 4, as it is: .*output.*not finite"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        run_study("isometry", IsometryConfig.from_dict(changes))


def test_a_space_of_several_activations_is_refused(tmp_path):
    space = mobilenet_v2()
    stages = (space.stages[0].replace(activation="hswish"), *space.stages[1:])
    space.replace(stages=stages).save(tmp_path / "mixed.yaml")
    path = str(tmp_path / "mixed.yaml")
    with pytest.raises(ConfigError, match=r"activations of their own \(hswish\), and the study of isometry gives all"):
        run_study("isometry", IsometryConfig(space=path))
    with pytest.raises(ConfigError, match=r"has stages .* \(hswish\), and the study of moments gives all"):
        run_study("moments module", ModuleConfig(space=path))


def test_a_module_itself_is_copied_for_every_setting():
    before = {name: value.clone() for name, value in INSTANCE.state_dict().items()}
    report = run_study("isometry", IsometryConfig(module=f"{__name__}:INSTANCE", input="4"))
    assert {row.setting for row in report.data["rows"]} == {"as it is", "orthogonal", "gaussian"}
    assert all(torch.equal(value, before[name]) for name, value in INSTANCE.state_dict().items())


def test_the_marks_of_blocks_are_met():
    marks = block_marks("relu")
    assert [mark.name for mark in marks if not mark.passed] == []
    assert len(marks) == 5


def test_closed_forms_of_a_whole_space():
    """All kinds of convolutions of the first stage of mobilenet_v2."""
    space = mobilenet_v2(resolution=32)
    space = space.replace(stages=space.stages[:3], head=())
    for scheme in ("orthogonal", "gaussian"):
        net = Supernet(space, init=scheme, fused=False)
        rows, marks = measure_convolutions(net, setting=scheme, scheme=scheme)
        assert {"depthwise 3 x 3", "depthwise 5 x 5", "depthwise 7 x 7", "pointwise, projection"} <= {
            row["kind"] for row in rows
        }
        assert [mark.name for mark in marks if not mark.passed] == []
        assert len(marks) > 8


def test_a_scheme_that_is_not_what_it_says_misses_its_marks():
    net = Supernet(tiny_space(), init="gaussian", fused=False)
    _, marks = measure_convolutions(net, setting="wrong", scheme="orthogonal")
    assert any(not mark.passed for mark in marks)


def test_shuffle_units_and_identities():
    """A stride-1 unit has a branch on half of its channels; an identity is no candidate to measure."""
    layers = tuple(Stage(16, 2, 2, (Block("shuffle", 3), Block("shuffle_xception", 3), Block("identity"))) for _ in "a")
    net = Supernet(tiny_space(stages=layers, activation="relu"), fused=False)
    images = torch.randn(16, 3, 16, 16)
    rows, spreads = measure_supernet(net, images, IsometryConfig(**SMALL), setting="s", path=(0, 2))
    first, second = ([row for row in rows if row.layer == i] for i in (0, 1))
    assert [row.name for row in first] == ["k3", "xception", "identity"]
    assert [row.name for row in second] == ["k3", "xception"]
    assert [row.acts for row in rows] == [2, 3, 0, 2, 3]
    assert first[0].branch.w_in == 8 * 8 * 8 and first[0].module.w_out == 16 * 4 * 4
    assert second[0].branch.w_in == second[0].branch.w_out == 8 * 4 * 4
    # half of the channels bypass
    assert second[0].module.phi == pytest.approx((1 + second[0].branch.phi) / 2, rel=0.3)
    assert len(spreads) == 4


def test_the_command_on_a_module(tmp_path, capsys, monkeypatch):
    (tmp_path / "users_own.py").write_text(
        "from torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "settings.yaml"
    settings.write_text("module: users_own:make\ninput: '7'\nbatch: 8\nsamples: 2\n")
    argv = ["isometry", "--config", str(settings), "--input", "5", "--out", str(tmp_path / "out"), "--seed", "3"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "isometry: module users_own:make, inputs: white noise of shape 5" in out
    assert "as it is" in out and "whole" in out
    record = json.loads((tmp_path / "out" / "isometry.json").read_text())
    assert (record["config"]["seed"], record["config"]["batch"]) == (3, 8)
    assert "parts" in (tmp_path / "out" / "isometry.html").read_text()
