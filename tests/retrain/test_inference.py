"""A trained network with its classes and its preprocessing: in its files, and asked about an image."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from tiny import tiny_space

import nasfast
from nasfast.data import preprocess
from nasfast.retrain import ImageInfo, classify, export_onnx, load_model, save_model
from nasfast.supernet import build

SPACE, ARCH = tiny_space(), (1, 0, 2, 1)
INFO = ImageInfo(tuple(f"class {i}" for i in range(SPACE.num_classes)), 16, 16, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


@pytest.fixture
def folder(tmp_path):
    network = build(SPACE, ARCH, seed=2)
    network.images = INFO
    save_model(network, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def picture():
    return Image.effect_noise((40, 30), 90.0).convert("RGB")


def test_the_files_say_how_images_become_the_input(folder):
    assert load_model(folder).images == INFO
    form = json.loads((folder / "config.json").read_text())
    told = form["pretrained_cfg"]
    assert (tuple(form["label_names"]), tuple(told["mean"]), tuple(told["std"])) == (INFO.classes, INFO.mean, INFO.std)
    assert told["crop_pct"] == INFO.resolution / INFO.short_side


def test_the_most_probable_classes_come_first(folder, picture):
    network = nasfast.load_model(folder).train()
    found = nasfast.classify(network, picture, top_k=2)
    with torch.no_grad():
        want = network.eval()(preprocess(picture, INFO)[None]).softmax(1)[0]
    best = want.argsort(descending=True)[:2].tolist()
    assert found == [(INFO.classes[i], pytest.approx(float(want[i]))) for i in best]
    assert sum(p for _, p in classify(network, picture, top_k=99)) == pytest.approx(1)
    with pytest.raises(ValueError, match="top_k must be 1 or more, got 0"):
        classify(network, picture, top_k=0)


def test_a_network_without_this_says_what_to_do(picture, tmp_path):
    network = build(SPACE, ARCH)
    save_model(network, tmp_path / "model.safetensors")
    network = load_model(tmp_path)
    assert network.images is None
    with pytest.raises(ValueError, match="set network.images"):
        classify(network, picture)


@pytest.mark.slow
def test_onnx_has_it_in_its_metadata(folder):
    import onnxruntime

    export_onnx(load_model(folder), folder / "model.onnx")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    found = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert ImageInfo.from_dict(found["images"]) == INFO
    assert (found["space"], found["arch"], found["macs"]) == (SPACE.name, list(ARCH), SPACE.cost(ARCH).macs)
