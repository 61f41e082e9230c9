"""The timm plug-in: `timm.create_model("nasfast")`, its arguments, and an unmodified script under the wrapper."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import timm
import torch

from nasfast.retrain import (
    ImageInfo,
    load_model,
    save_model,
    timm_plugin,  # noqa: F401  registers the model
)

SCRIPT = '''
"""Trains a few steps the way timm's train.py does."""
import argparse, sys
import timm, torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
import sibling

parser = argparse.ArgumentParser()
parser.add_argument("data"), parser.add_argument("--model")
parser.add_argument("--model-kwargs", nargs="*", default=[])
args = parser.parse_args()
kwargs = dict(pair.split("=") for pair in args.model_kwargs)
torch.manual_seed(0)
model = timm.create_model(args.model, num_classes=3, drop_rate=0.0, in_chans=3, **kwargs)
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


def test_pretrained_logits_are_the_networks(retrained):
    model = timm.create_model("nasfast", pretrained=True, arch=str(retrained.folder)).eval()
    x = retrained.val[0][0]
    with torch.no_grad():
        assert torch.equal(model(x), load_model(retrained.folder)(x))
        features = model.forward_features(x)
        assert features.shape == (8, 16, 8 // 2, 8 // 2)
        assert torch.equal(model.forward_head(features), model(x))
        assert torch.equal(model.forward_head(features, pre_logits=True), features.mean((2, 3)))


def test_fresh_weights_follow_torchs_seed(retrained):
    def weight(seed: int):
        torch.manual_seed(seed)
        return timm.create_model("nasfast", arch=retrained.folder).network.stem[0].conv.weight

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
    assert not torch.equal(weight(1), load_model(retrained.folder).stem[0].conv.weight)


def test_fresh_networks_keep_the_activation(retrained):
    """The network was trained with tanh blocks; the space says relu6."""
    model = timm.create_model("nasfast", arch=str(retrained.folder))
    assert model.network.activation == "tanh"


def test_the_model_describes_itself(retrained):
    model = timm.create_model("nasfast", arch=str(retrained.folder))
    assert (model.num_classes, model.num_features, model.head_hidden_size) == (4, 16, 16)
    assert timm.data.resolve_data_config({}, model=model)["input_size"] == (3, 16, 16)
    assert model.get_classifier() is model.network.classifier
    name = model.default_cfg["classifier"]
    assert dict(model.named_modules())[name] is model.get_classifier()
    assert "nasfast" in timm.list_models()


@pytest.mark.parametrize("pretrained", [True, False])
def test_images_become_the_input_as_in_the_training(retrained, tmp_path, pretrained):
    """A small image is not cropped at evaluation, and these images had another mean than those of ImageNet."""
    network = load_model(retrained.folder)
    network.images = ImageInfo(tuple("abcd"), 16, 16, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_model(network, tmp_path / "model.safetensors")
    model = timm.create_model("nasfast", pretrained=pretrained, arch=str(tmp_path))
    config = timm.data.resolve_data_config({}, model=model)
    assert (config["crop_pct"], config["mean"], config["std"]) == (1.0, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_number_of_classes(retrained):
    model = timm.create_model("nasfast", pretrained=True, arch=str(retrained.folder), num_classes=7)
    x = retrained.val[0][0]
    assert model(x).shape == (8, 7)
    model.reset_classifier(2)
    assert (model(x).shape, model.num_classes) == ((8, 2), 2)
    assert model.get_classifier().bias is not None
    kept = timm.create_model("nasfast", pretrained=True, arch=str(retrained.folder), num_classes=4)
    assert torch.equal(kept.get_classifier().weight, load_model(retrained.folder).classifier.weight)


def test_an_architecture_is_required():
    with pytest.raises(ValueError, match="needs the folder of an exported model"):
        timm.create_model("nasfast")


def test_other_input_channels_are_refused(retrained):
    with pytest.raises(ValueError, match="the space has 3 input channels, got in_chans=1"):
        timm.create_model("nasfast", arch=str(retrained.folder), in_chans=1)
    timm.create_model("nasfast", arch=str(retrained.folder), in_chans=3)


def test_arguments_that_would_be_ignored_are_refused(retrained):
    with pytest.raises(ValueError, match="has no drop_path_rate, drop_rate; allowed: arch, num_classes"):
        timm.create_model("nasfast", arch=str(retrained.folder), drop_rate=0.2, drop_path_rate=0.1)
    timm.create_model("nasfast", arch=str(retrained.folder), drop_rate=0.0, drop_path_rate=None)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing"):
        timm.create_model("nasfast", arch=str(tmp_path))


def wrapper(*arguments: str, cwd) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nasfast.retrain.timm_train", *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_an_unmodified_script_trains_under_the_wrapper(retrained, tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "sibling.py").write_text("VALUE = 42\n")
    arguments = ["scripts/train.py", "DATA", "--model", "nasfast", "--model-kwargs", f"arch={retrained.folder}"]
    done = wrapper(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "input (3, 16, 16) trained 42"
    assert "Overwriting" not in done.stderr, "the model was registered twice"
