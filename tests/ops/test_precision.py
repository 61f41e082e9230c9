"""`precision: auto`: which number type commands take where no setting names one, and who keeps what it had."""

import itertools
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nasfast.measure.config import LatencyConfig, StepTimesConfig
from nasfast.measure.latency import table_head
from nasfast.ops import backends, precision
from nasfast.ops.precision import default_precision, resolve_precision
from nasfast.pipeline.run import resolved
from nasfast.settings import RunConfig, TrainConfig
from nasfast.train import TrainStage, train
from nasfast.train.state import with_precision

MISSING = "not built with CUDA"


@pytest.fixture
def machine(monkeypatch):
    """Makes PyTorch and the extension say that this machine has a GPU, or none (None)."""

    def has(capability: tuple[int, int] | None, missing: str = "") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if capability is None else 1)
        monkeypatch.setattr(backends, "_native_missing", None)
        monkeypatch.setattr(backends, "_why_no_cuda_kernels", lambda device: missing)

    return has


TABLE = [
    # capability, what is missing, device -> what auto means
    (None, "", "auto", "fp32"),
    (None, "", "cpu", "fp32"),
    (None, "", "cuda", "fp32"),  # the device is refused later, by whoever uses it
    ((7, 5), "", "auto", "fp32"),
    ((8, 0), "", "auto", "bf16"),
    ((8, 0), "", "cuda:0", "bf16"),
    ((9, 0), "", "cuda", "bf16"),
    ((9, 0), MISSING, "cuda", "fp32"),
    ((9, 0), MISSING, "auto", "fp32"),
    ((9, 0), "", "cpu", "fp32"),
    ((9, 0), "", "onnx", "fp32"),
]


@pytest.mark.parametrize(("capability", "missing", "device", "meant"), TABLE)
def test_auto_is_bf16_where_the_cuda_kernels_run(capability, missing, device, meant, machine, caplog):
    machine(capability, missing)
    # tensors of a GPU that is not there
    with FakeTensorMode(), caplog.at_level(logging.INFO, logger=precision.__name__):
        assert resolve_precision("auto", device) == resolve_precision("auto", device) == meant
        assert {name: resolve_precision(name, device) for name in ("fp32", "bf16")} == {"fp32": "fp32", "bf16": "bf16"}
        reason = default_precision(device)[1]
    logs = capability is not None and device not in ("cpu", "onnx")
    messages = [record.message for record in caplog.records]
    assert messages == [f"precision auto: {meant} on the GPU ({reason})"] * logs, (
        "once, and only where it was a question"
    )
    if missing and logs:
        assert MISSING in reason
    if capability == (7, 5):
        assert "needs compute capability 8.0" in reason


def test_the_emulation_of_cuda_changes_no_default(machine, monkeypatch):
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    machine(None)
    assert resolve_precision("auto", "cpu") == "fp32"


def test_auto_is_the_default_of_every_command(machine):
    assert RunConfig().train.precision == RunConfig().retrain.train.precision == "auto"
    assert TrainConfig().precision == StepTimesConfig().dtype == LatencyConfig().dtype == "auto"
    space = LatencyConfig(space="digits_mini").resolve()
    for capability, want in ((None, "fp32"), ((9, 0), "bf16")):
        machine(capability)
        with FakeTensorMode():
            cfg = resolved(RunConfig())
            assert (cfg.train.precision, cfg.retrain.train.precision) == (want, want)
            assert table_head(LatencyConfig(device="cuda"), space)["dtype"] == want
        assert (
            table_head(LatencyConfig(), space)["dtype"]
            == table_head(LatencyConfig(device="onnx"), space)["dtype"]
            == "fp32"
        )


@pytest.mark.parametrize(("saved", "given"), [*itertools.product(("fp32", "bf16"), ("auto", "fp32", "bf16"))])
def test_a_run_keeps_what_its_config_says(saved, given, tmp_path, machine):
    machine((9, 0) if saved == "fp32" else None)  # a machine on which auto would be the other one
    before = RunConfig(out=str(tmp_path), train=TrainConfig(precision=saved))
    before.save(tmp_path / "config.yaml")
    with FakeTensorMode():
        now = resolved(RunConfig(out=str(tmp_path), train=TrainConfig(precision=given)))
    assert now.train.precision == (saved if given == "auto" else given)
    # nothing is known of the retraining, so the machine decides
    assert now.retrain.train.precision == ("bf16" if saved == "fp32" else "fp32")


@pytest.mark.parametrize("text", ["", "train: [", "train: {precision: fp16}"])
def test_a_damaged_config_leaves_the_choice_to_the_machine(text, tmp_path, machine):
    machine(None)
    (tmp_path / "config.yaml").write_text(text)
    assert resolved(RunConfig(out=str(tmp_path))).train.precision == "fp32"


def test_a_training_goes_on_in_the_type_of_its_checkpoints(tmp_path, machine):
    """Also where no config.yaml says it, and the machine would choose another."""
    batches = [(torch.randn(4, 3, 1, 1), torch.tensor([0, 1, 0, 1]))] * 2

    def run(epochs: int, name: str, *, resume: bool) -> None:
        torch.manual_seed(0)
        stage = TrainStage("s", tmp_path, "f", resume=resume, extends=True)
        train(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2)),
            batches,
            TrainConfig(epochs=epochs, lr=0.1, precision=name),
            stage,
        )

    run(1, "bf16", resume=False)
    run(2, "auto", resume=True)
    stage = TrainStage("s", tmp_path, "f", resume=True)
    assert with_precision(TrainConfig(), stage, "cpu").precision == "bf16"
    machine((9, 0))
    for path in (tmp_path / "checkpoints").glob("*"):
        path.write_bytes(b"damaged")
    with FakeTensorMode():
        assert with_precision(TrainConfig(), stage, "cuda").precision == "bf16"
        assert with_precision(TrainConfig(), stage, "cpu").precision == "fp32"
