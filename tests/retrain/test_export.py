"""A network as files: the same logits, classes and errors after reloading, programs of torch.export and ONNX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import batches, tiny_excited_space, tiny_space

from nasfast.data import preprocess
from nasfast.retrain import (
    ImageInfo,
    RetrainConfig,
    RetrainResult,
    classify,
    export_onnx,
    export_program,
    load_model,
    save_model,
)
from nasfast.retrain.card import write_card
from nasfast.search import Candidate, Limits, save_candidates
from nasfast.spaces import SKIP, CostTable
from nasfast.supernet import build

SPACE, ARCH = tiny_space(), (1, 0, 2, SKIP)
INFO = ImageInfo(tuple(f"class {i}" for i in range(SPACE.num_classes)), 16, 16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture
def network():
    """A network whose running statistics change its results."""
    return trained()


def trained(space=SPACE):
    network = build(space, ARCH, seed=2)
    for x, _ in batches(3):
        network.train()(x)
    network.images = INFO
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
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_saving_again_gives_the_same_bytes(network, folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("again")
    save_model(load_model(folder), other / "model.safetensors")
    for name in ("config.json", "model.safetensors"):
        assert (other / name).read_bytes() == (folder / name).read_bytes()


def test_the_files_say_how_images_become_the_input(folder):
    assert load_model(folder).images == INFO
    form = json.loads((folder / "config.json").read_text())
    told = form["pretrained_cfg"]
    assert (tuple(form["label_names"]), tuple(told["mean"]), tuple(told["std"])) == (INFO.classes, INFO.mean, INFO.std)
    assert told["crop_pct"] == INFO.resolution / INFO.short_side


def test_the_most_probable_classes_come_first(folder):
    network, picture = load_model(folder).train(), Image.effect_noise((40, 30), 90.0).convert("RGB")
    found = classify(network, picture, top_k=2)
    with torch.no_grad():
        want = network.eval()(preprocess(picture, INFO)[None]).softmax(1)[0]
    best = want.argsort(descending=True)[:2].tolist()
    assert found == [(INFO.classes[i], pytest.approx(float(want[i]))) for i in best]
    assert sum(p for _, p in classify(network, picture, top_k=99)) == pytest.approx(1)
    with pytest.raises(ValueError, match="top_k must be 1 or more, got 0"):
        classify(network, picture, top_k=0)
    network.images = None
    save_model(network, folder / "model.safetensors")
    with pytest.raises(ValueError, match="set network.images"):
        classify(load_model(folder), picture)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing: an exported model is"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("data", [b"", b"\x00\xff[" * 20], ids=["empty", "foreign"])
def test_a_damaged_file_is_a_value_error(folder, name, data):
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=r"\S"):
        load_model(folder)


def test_one_changed_bit_is_noticed(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="does not have the weights of .*config.json.*retrain --resume"):
        load_model(folder)


def test_weights_of_a_network_of_the_same_shapes_are_refused(folder):
    """Activation and choices need not show in the shapes of the weights."""
    form = json.loads((folder / "config.json").read_text())
    form["model_args"]["activation"] = "tanh"
    (folder / "config.json").write_text(json.dumps(form))
    with pytest.raises(ValueError, match="does not have the weights of .*config.json: they belong to .*'relu6'"):
        load_model(folder)


WITHOUT_NASFAST = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nasfast":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.path += sys.argv[1].split(":")
import torch
network, (images, want) = torch.export.load(sys.argv[2]).module(), torch.load(sys.argv[3])
with torch.no_grad():
    for count in (1, len(images)):
        torch.testing.assert_close(network(images[:count]), want[:count])
assert "nasfast" not in sys.modules and not hasattr(torch.ops.nasfast, "bn_act")
print("equal")
"""


@pytest.mark.slow
def test_plain_pytorch_computes_the_same_without_nasfast(network, tmp_path):
    """-I ignores PYTHONPATH, -S the packages of the environment, from which torch alone is found again."""
    path, images = tmp_path / "model.pt2", torch.randn(5, 3, 16, 16)
    assert export_program(network, path) < 1e-4
    with torch.no_grad():
        torch.save((images, network(images)), tmp_path / "logits.pt")
    code = [sys.executable, "-I", "-S", "-c", WITHOUT_NASFAST]
    where = os.pathsep.join(p for p in sys.path if p.endswith("-packages"))
    done = subprocess.run([*code, where, path, tmp_path / "logits.pt"], capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr
    assert str(Path(torch.__file__).parent).encode() not in path.read_bytes(), "the file has a path of this machine"


@pytest.mark.slow
def test_a_program_with_an_operator_of_another_library_is_refused(network, tmp_path):
    @torch.library.custom_op("nasfast_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Double(torch.nn.Module):
        def forward(self, x):
            return double(x)

    double.register_fake(torch.empty_like)
    network.blocks[1] = Double()
    with pytest.raises(RuntimeError, match="model.pt2 is not written: .* could not call nasfast_tests.double.default"):
        export_program(network, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_the_card_says_what_is_known(network, folder):
    network.images = None
    text = write_card(network, folder, run_dir=folder).read_text()
    cost = SPACE.cost(ARCH)
    assert f"| MACs per image | {cost.macs:,} |" in text and f"| parameters | {cost.params:,} |" in text
    assert "| latency | not measured |" in text
    assert "Its accuracy is not known" in text and "How images become the input, and what the classes are" in text

    cfg = RetrainConfig(patience=3)
    result = RetrainResult(ARCH, cost.macs, cost.params, 0.8, 1.0, 0.5, 9, 1.0, 100, "ff" * 12 + "f0", settings=cfg)
    (folder / "result.json").write_text(json.dumps(result.to_dict()))
    table = CostTable("latency", "ms", tuple(tuple((c, 0.25) for c in (SKIP, 0, 1, 2)) for _ in range(4)), about="here")
    found = [Candidate(ARCH, 1.0, cost.macs, cost.params, values=(1.25,))]
    save_candidates(folder / "archs.json", SPACE, found, limits=Limits(tables=((table, None),)))
    text = write_card(network, folder, run_dir=folder).read_text()
    # Wilson's interval of 80 of 100, by the formula
    assert "| top-1 accuracy | 80.00% (95 % interval 71.12% to 86.66%) |" in text
    assert "on 100 validation images, which also chose the epoch" in text and "after one training of 9 epochs" in text
    assert "| latency, by a table of its layers | 1.25 ms (here) |" in text and "not measured" not in text


@pytest.mark.slow
def test_onnx_computes_the_same_at_any_batch_size(tmp_path):
    """Of a network with every form of squeeze-and-excitation, and with a skip."""
    import onnxruntime

    space, path = tiny_excited_space(), tmp_path / "deep" / "model.onnx"
    network = trained(space)
    assert 0 <= export_onnx(network, path) < 1e-4
    assert not network.training
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        (got,) = session.run(["logits"], {"images": x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(got), network(x), rtol=1e-4, atol=1e-4)
    found = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert ImageInfo.from_dict(found["images"]) == INFO
    assert (found["space"], found["arch"], found["macs"]) == (space.name, list(ARCH), space.cost(ARCH).macs)


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
