"""One profiled step: ranges of every layer, tables, the trace, and the nsys command line."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from tiny import tiny_space

from nasfast.config import ConfigError
from nasfast.measure import profile as module
from nasfast.measure.config import ProfileConfig
from nasfast.measure.profile import profile
from nasfast.ops.autograd import WRAPPER

LAYERS = ["stem.0", "layers.0", "layers.1", "layers.2", "layers.3", "head.0", "classifier"]


@pytest.fixture
def cfg(tmp_path) -> ProfileConfig:
    tiny_space().save(tmp_path / "tiny.yaml")
    return ProfileConfig(space=str(tmp_path / "tiny.yaml"), batch=4, device="cpu", out=str(tmp_path / "out"))


def ranges_of(report) -> dict[str, tuple[float, float]]:
    """Name -> start and end of the ranges in the trace, in microseconds."""
    events = json.loads(report.trace.read_text())["traceEvents"]
    notes = [event for event in events if event.get("cat") == "user_annotation"]
    assert len({event["name"] for event in notes}) == len(notes)
    return {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in notes}


@pytest.mark.parametrize(
    ("method", "without_backward"),
    # with the literal DI-NAS the stem is frozen and its input needs no gradient
    [("dinas_paper", ["stem.0"]), ("dinas", []), ("spos", [])],
)
def test_every_layer_has_its_ranges(cfg, method, without_backward):
    ranges = ranges_of(profile(cfg.replace(method=method)))
    with_backward = [name for name in LAYERS if name not in without_backward]
    wanted = [f"forward {name}" for name in LAYERS] + [f"backward {name}" for name in with_backward]
    assert ranges.keys() == {"forward", "backward", *wanted}
    # one after another, forward in order and backward in reverse, inside the phases
    order = [f"forward {name}" for name in LAYERS] + [f"backward {name}" for name in reversed(with_backward)]
    assert sorted(wanted, key=lambda name: ranges[name][0]) == order
    for before, after in zip(order, order[1:], strict=False):
        assert ranges[before][1] <= ranges[after][0], (before, after)
    for name in wanted:
        outer = ranges[name.split()[0]]
        assert outer[0] <= ranges[name][0] <= ranges[name][1] <= outer[1], name


def test_operators_lie_in_the_ranges_of_their_layers(cfg):
    """Not empty: the operators of a block start inside its ranges, in both phases."""
    report = profile(cfg.replace(path="0 0 2 0"))
    ranges = ranges_of(report)
    events = json.loads(report.trace.read_text())["traceEvents"]
    starts = [event["ts"] for event in events if event.get("cat") == "cpu_op"]
    for name in ("layers.0", "layers.2"):
        for phase in ("forward", "backward"):
            low, high = ranges[f"{phase} {name}"]
            assert any(low <= start <= high for start in starts), (phase, name)


def test_tables(cfg):
    report = profile(cfg.replace(top=5, method="dinas_paper"))
    assert [row.name for row in report.layers] == [*LAYERS, "rest"]
    assert [row.block for row in report.layers[1:5]] == ["k3 e2", "k5 e1", "k3 e3", "k3 e2"]
    assert all(row.forward_ms > 0 for row in report.layers[:-1])
    assert report.layers[0].backward_ms == 0.0
    assert all(row.backward_ms > 0 for row in report.layers[1:-1])
    assert len(report.ops) == 5
    assert [row.self_ms for row in report.ops] == sorted((row.self_ms for row in report.ops), reverse=True)
    assert 0 < sum(row.share for row in report.ops) <= 1
    ops = {row.name: row for row in profile(cfg.replace(top=1000, method="dinas_paper")).ops}
    names = ops.keys()
    # the time of an operator's autograd function is the operator's; only backward passes have rows of their own
    assert ops["nasfast::conv_bn_act_chain_fwd"].calls > 0 and ops["nasfast::conv_bn_act_chain_bwd"].calls > 0
    assert not [name for name in names if name.startswith(WRAPPER) and not name.endswith("Backward")]
    assert not names & {"forward", "backward", "forward layers.0"}
    text = str(report)
    for word in (
        "one training step: tiny, dinas_paper, batch 4, 16 x 16, fp32, cpu",
        "layers.3",
        "self ms",
        "trace.json",
    ):
        assert word in text


@pytest.mark.parametrize("method", ["dinas", "spos"])
def test_a_layer_indicator_and_a_skipped_layer(cfg, method):
    """DI-NAS runs the indicator of a skipped layer, SPOS nothing; the ranges of the others stay in order."""
    report = profile(cfg.replace(path="0 -1 0 0", method=method))
    assert (report.layers[2].name, report.layers[2].block) == ("layers.1", "skip")
    ranges = ranges_of(report)
    order = [f"backward layers.{i}" for i in (3, 2, 1, 0)]
    for before, after in zip(order, order[1:], strict=False):
        assert ranges[before][1] <= ranges[after][0], (before, after)


def test_no_time_is_counted_twice(cfg):
    """Times of their own add up to the step, whatever ranges lie across the operators.

    On a busy machine the process also waits between operators, so one step of three must have little of that.
    """
    shares = []
    for _ in range(3):
        report = profile(cfg.replace(top=1000, method="spos"))
        step = sum(row.forward_ms + row.backward_ms for row in report.layers)
        shares.append(sum(row.self_ms for row in report.ops) / step)
    assert 0.5 < max(shares) < 1.2


def test_bf16(cfg):
    names = {row.name for row in profile(cfg.replace(dtype="bf16", top=1000)).ops}
    assert "aten::_to_copy" in names or "aten::to" in names


def test_hooks_are_gone_afterwards(cfg, monkeypatch):
    nets = []

    class Noted(module.Supernet):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            nets.append(self)

    monkeypatch.setattr(module, "Supernet", Noted)
    profile(cfg)
    for layer in nets[0].modules():
        assert not layer._forward_pre_hooks and not layer._forward_hooks


def test_ranges_change_nothing(cfg):
    """The gradients of a step with ranges are those of a step without."""
    space, path = cfg.resolve()
    net = module.Supernet(space).train()
    images, labels = module.random_batch(space, cfg.batch)
    step = module.TrainingStep(net, images, labels, path=path)
    step()
    want = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    layers = {name: layer for name, (layer, _) in module._layers_of(net, path).items()}
    with module._Ranges(layers) as ranges:
        module._run(step, ranges)
    got = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert want.keys() == got.keys()
    assert all(torch.equal(grad, got[name]) for name, grad in want.items())


def test_the_nsys_command_repeats_the_settings():
    words = shlex.split(module._nsys_command(ProfileConfig(path="0 1 2", batch=8, dtype="bf16", out="runs/p q")))
    assert words[:2] == ["nsys", "profile"]
    assert "--trace=cuda,nvtx,cudnn,cublas" in words
    assert "--capture-range=cudaProfilerApi" in words
    assert "--output=runs/p q/nsys" in words
    command = words[words.index("nasfast") :]
    assert command[:2] == ["nasfast", "profile"]
    assert {"--path=0 1 2", "--batch=8", "--dtype=bf16", "--out=runs/p q", "--device=cuda", "--tracer=nvtx"} == set(
        command[2:]
    )


def test_the_ncu_command_counts_every_kernel_of_the_profiled_step():
    words = shlex.split(module._ncu_command(ProfileConfig(dtype="bf16", out="runs/p")))
    assert words[:5] == ["ncu", "--set=full", "--nvtx", "--profile-from-start=off", "--export=runs/p/ncu"]
    assert set(words[7:]) == {"--dtype=bf16", "--out=runs/p", "--device=cuda", "--tracer=nvtx"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tracer": "nvtx"}, "tracer='nvtx' marks ranges for nsys and needs a GPU, got device='cpu'"),
        ({"top": 0}, "top must be at least 1, got 0"),
        ({"method": "dina"}, "got 'dina', allowed: 'dinas', 'dinas_paper', 'bnnas', 'fairnas', 'spos'"),
    ],
)
def test_wrong_settings_are_named(cfg, changes, message):
    with pytest.raises(ConfigError, match=message):
        profile(ProfileConfig.from_dict({**cfg.to_dict(), **changes}))


def test_an_unwritable_folder_is_an_os_error(cfg, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        profile(cfg.replace(out=str(tmp_path / "file" / "out")))


@pytest.mark.parametrize("tracer", ["torch", "nvtx"])
def test_on_a_gpu(cfg, tracer, gpu):
    report = profile(cfg.replace(device=gpu, tracer=tracer))
    assert report.nsys is not None and "--tracer=nvtx" in report.nsys
    if tracer == "torch":
        assert all(row.forward_ms > 0 for row in report.layers[1:-1])
        assert all(row.backward_ms > 0 for row in report.layers[1:-1])
