"""The timm plug-in: networks from folders and the hub, arguments, maps, and an unmodified script under the wrapper."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from nasfast.retrain import ImageInfo, load_model, save_model
from nasfast.spaces import get_space
from nasfast.supernet import build

timm = pytest.importorskip("timm")
from nasfast.retrain import timm_plugin  # noqa: E402, F401  registers the model

SCRIPT = '''
"""Trains a few steps the way timm's train.py does."""
import argparse, sys
import timm, torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
import sibling

parser = argparse.ArgumentParser()
parser.add_argument("data"), parser.add_argument("--model")
args = parser.parse_args()
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=3, drop_rate=0.0, in_chans=3)
config = timm.data.resolve_data_config({}, model=model)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.2, momentum=0.9, weight_decay=1e-4)
scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=8, warmup_epochs=0)
x = torch.randn(12, *config["input_size"]); y = torch.arange(12) % 3
x[:, 0] += 3 * (y == 0).view(-1, 1, 1); x[:, 1] += 3 * (y == 1).view(-1, 1, 1)
losses = []
for epoch in range(8):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model.train()(x), y)
    loss.backward(); optimizer.step(); scheduler.step(epoch + 1)
    losses.append(loss.item())
assert losses[-1] < 0.7 * losses[0], losses
assert __name__ == "__main__" and sys.argv[1] == args.data == "DATA"
print("input", config["input_size"], "trained", sibling.VALUE)
'''


@pytest.fixture
def name(retrained) -> str:
    return f"local-dir:{retrained.folder}"


def test_pretrained_logits_are_the_networks(retrained, name):
    model = timm.create_model(name, pretrained=True).eval()
    x = retrained.val[0][0]
    with torch.no_grad():
        assert torch.equal(model(x), load_model(retrained.folder)(x))
        features = model.forward_features(x)
        assert features.shape == (8, 16, 8 // 2, 8 // 2)
        assert torch.equal(model.forward_head(features), model(x))
        assert torch.equal(model.forward_head(features, pre_logits=True), features.mean((2, 3)))


def test_a_network_of_the_hub(retrained, tmp_path, monkeypatch):
    """The hub's files are in its cache, laid out as a download leaves them, and nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--me--net"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40)).symlink_to(retrained.folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model = timm.create_model("hf-hub:me/net", pretrained=True, cache_dir=tmp_path).eval()
    x = retrained.val[0][0]
    with torch.no_grad():
        assert torch.equal(model(x), load_model(retrained.folder)(x))


def test_maps_of_a_backbone(retrained, name):
    model = timm.create_model(name, pretrained=True, features_only=True).eval()
    assert model.feature_info.channels() == [8, 12] and model.feature_info.reduction() == [2, 4]
    network, x = load_model(retrained.folder), retrained.val[0][0]
    with torch.no_grad():
        small, smaller = model(x)
        stem = network.stem(x)
        assert torch.equal(small, stem) and torch.equal(smaller, network.blocks(stem))
        (only,) = timm.create_model(name, pretrained=True, features_only=True, out_indices=(1,)).eval()(x)
        assert torch.equal(only, smaller)


def test_maps_are_as_deep_as_their_reduction_says():
    space = get_space("mobilenet_v2", resolution=64)
    network = build(space, (0,) * len(space)).eval()
    kwargs = {"space": space.to_dict(), "arch": network.arch, "features_only": True}
    model = timm.create_model("nasfast", **kwargs).eval()
    assert model.feature_info.reduction() == [2, 4, 8, 16, 32]
    with torch.no_grad():
        shapes = [tuple(y.shape) for y in model(torch.zeros(1, 3, 64, 64))]
    info = zip(model.feature_info.channels(), model.feature_info.reduction(), strict=True)
    assert shapes == [(1, channels, 64 // r, 64 // r) for channels, r in info]


@pytest.mark.parametrize("pretrained", [True, False])
def test_images_become_the_input_as_in_the_training(retrained, tmp_path, pretrained):
    """A small image is not cropped at evaluation, and these images had another mean than those of ImageNet."""
    network = load_model(retrained.folder)
    network.images = ImageInfo(tuple("abcd"), 16, 16, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_model(network, tmp_path / "model.safetensors")
    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=pretrained)
    config = timm.data.resolve_data_config({}, model=model)
    assert (config["crop_pct"], config["mean"], config["std"]) == (1.0, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert tuple(model.pretrained_cfg["label_names"]) == tuple("abcd")


def test_number_of_classes(retrained, name):
    model = timm.create_model(name, pretrained=True, num_classes=7)
    x = retrained.val[0][0]
    assert model(x).shape == (8, 7)
    assert torch.equal(model.stem[0].conv.weight, load_model(retrained.folder).stem[0].conv.weight)
    model.reset_classifier(2)
    assert (model(x).shape, model.num_classes) == ((8, 2), 2)
    assert model.get_classifier().bias is not None
    model.reset_classifier(0)
    assert (model(x).shape, model.num_classes) == ((8, 16), 0)
    kept = timm.create_model(name, pretrained=True, num_classes=4)
    assert torch.equal(kept.get_classifier().weight, load_model(retrained.folder).classifier.weight)


def test_what_is_no_exported_network_and_other_input_channels_are_refused(name):
    with pytest.raises(ValueError, match="needs an exported network: name the model local-dir:"):
        timm.create_model("nasfast")
    with pytest.raises(ValueError, match="the space has 3 input channels, got in_chans=1"):
        timm.create_model(name, in_chans=1)


@pytest.mark.parametrize(
    "argument", [{"global_pool": ""}, {"global_pool": "max"}, {"drop_rate": 0.5}, {"act_layer": ""}]
)
def test_arguments_that_would_be_ignored_are_refused(name, argument):
    """Without pooling a backbone gives maps (github.com/huggingface/pytorch-image-models/issues/264)."""
    with pytest.raises(ValueError, match=f"has no {next(iter(argument))}"):
        timm.create_model(name, num_classes=0, **argument)
    same = timm.create_model(name, global_pool="avg", drop_rate=0.0, drop_path_rate=None)
    with pytest.raises(ValueError, match="global_pool must be 'avg', got ''"):
        same.reset_classifier(0, "")


def test_an_unmodified_script_trains_under_the_wrapper(retrained, tmp_path, monkeypatch, capsys, recwarn, caplog):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "sibling.py").write_text("VALUE = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-m", "scripts/train.py", "DATA", "--model", f"local-dir:{retrained.folder}"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as `python -m` has it
    runpy.run_module("nasfast.retrain.timm_train", run_name="__main__", alter_sys=True)
    assert capsys.readouterr().out.strip() == "input [3, 16, 16] trained 42"
    said = [str(warning.message) for warning in recwarn] + caplog.messages
    assert not any("Overwriting" in line for line in said), "the model was registered twice"
