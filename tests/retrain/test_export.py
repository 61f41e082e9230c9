"""A network as files: the same logits after reloading, errors that name the file, and ONNX."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny import batches, tiny_excited_space, tiny_space

from nasfast.retrain import export_onnx, load_model, save_model
from nasfast.spaces import SKIP
from nasfast.supernet import build

SPACE, ARCH = tiny_space(), (1, 0, 2, SKIP)


@pytest.fixture
def network():
    """A network whose running statistics change its results."""
    network = build(SPACE, ARCH, seed=2)
    for x, _ in batches(3):
        network.train()(x)
    return network.eval()


@pytest.fixture
def folder(network, tmp_path):
    save_model(network, tmp_path / "model.safetensors")
    return tmp_path


def test_reloaded_logits_are_equal(network, folder):
    x = batches(1)[0][0]
    for path in (folder, folder / "model.safetensors"):
        again = load_model(path)
        assert not again.training
        assert (again.arch, again.space) == (ARCH, SPACE)
        assert torch.equal(again(x), network(x))
    assert sorted(p.name for p in folder.iterdir()) == ["arch.json", "model.safetensors", "space.yaml"]


def test_loading_draws_no_weights(folder, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("an orthogonal init of weights that are overwritten takes seconds")

    monkeypatch.setattr(torch.linalg, "qr", fail)
    load_model(folder)


def test_saving_again_gives_the_same_bytes(network, folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("again")
    save_model(load_model(folder), other / "model.safetensors")
    for name in ("arch.json", "model.safetensors", "space.yaml"):
        assert (other / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["arch.json", "model.safetensors", "space.yaml"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing: an exported model is"):
        load_model(folder)


@pytest.mark.parametrize("name", ["arch.json", "model.safetensors", "space.yaml"])
@pytest.mark.parametrize("kind", ["truncated", "empty", "foreign"])
def test_a_damaged_file_is_a_value_error(folder, name, kind):
    path = folder / name
    data = {"truncated": path.read_bytes()[: len(path.read_bytes()) // 2], "empty": b"", "foreign": b"\x00\xff[" * 20}[
        kind
    ]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"\S"):
        load_model(folder)


def test_weights_of_another_architecture_are_refused(folder):
    form = json.loads((folder / "arch.json").read_text())
    form["arch"] = [0, 0, 2, SKIP]
    (folder / "arch.json").write_text(json.dumps(form))
    with pytest.raises(ValueError, match="does not have the weights of .*arch.json"):
        load_model(folder)


@pytest.mark.parametrize("place", [100, -100], ids=["header", "weights"])
def test_one_changed_bit_is_noticed(folder, place):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not have the weights of .*arch.json.*retrain --resume"):
        load_model(folder)


def test_weights_of_a_network_of_the_same_shapes_are_refused(folder):
    """Activation and choices need not show in the shapes of the weights."""
    form = (folder / "space.yaml").read_text()
    (folder / "space.yaml").write_text(form.replace("activation: relu6", "activation: tanh"))
    arch = json.loads((folder / "arch.json").read_text())
    arch["fingerprint"] = SPACE.replace(activation="tanh").fingerprint
    (folder / "arch.json").write_text(json.dumps(arch))
    with pytest.raises(ValueError, match="does not have the weights of .*arch.json: they belong to .*'relu6'"):
        load_model(folder)


@pytest.mark.slow
def test_squeeze_and_excitation_in_onnx(tmp_path):
    """`export_onnx` compares onnxruntime with PyTorch."""
    network = build(tiny_excited_space(), (1, 2, 0, 1), seed=2)
    for x, _ in batches(3):
        network.train()(x)
    assert export_onnx(network, tmp_path / "model.onnx") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5])
def test_onnx_computes_the_same_at_any_batch_size(onnx_file, batch):
    import onnxruntime

    network, path, difference = onnx_file
    assert 0 <= difference < 1e-4
    x = torch.randn(batch, 3, 16, 16)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(["logits"], {"images": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), network(x), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory):
    network = build(SPACE, ARCH, seed=2)
    for x, _ in batches(3):
        network.train()(x)
    path = tmp_path_factory.mktemp("onnx") / "deep" / "model.onnx"
    difference = export_onnx(network, path)
    assert not network.training
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]
    return network, path, difference


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named(network, tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=r"ONNX export needs .*pip install 'nasfast\[onnx\]'"):
        export_onnx(network, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_network_that_computes_something_else_is_refused(network, tmp_path, monkeypatch):
    import onnxruntime

    class Wrong:
        def __init__(self, *_, **__) -> None: ...

        def run(self, _, inputs):
            return [network(torch.from_numpy(inputs["images"])).detach().numpy() * 1.01]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    monkeypatch.setattr(torch.onnx, "export", lambda _, __, path, **___: Path(path).write_bytes(b"wrong"))
    (tmp_path / "model.onnx").write_bytes(b"an earlier export")
    with pytest.raises(RuntimeError, match="onnxruntime differs from PyTorch by 0.01"):
        export_onnx(network, tmp_path / "model.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"an earlier export"
