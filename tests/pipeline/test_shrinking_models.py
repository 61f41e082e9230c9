"""`nasfast shrink` on networks of torchvision with random weights: whatever is in them gets through every stage."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from tiny import write_folder
from torch import nn

from nasfast import shrink
from nasfast.cli.main import main
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session

SIZES = {"mobilenet_v2": 32, "efficientnet_b0": 32, "resnet18": 64}
"""Sides of the images in pixels: of wide convolutions, small images say too little."""

FLAGS = (
    "--epochs 1 --teacher_epochs 1 --finetune all --finetune_epochs 1 "
    "--measure_images 80 --score_images 2 --held_out 8 --top_k 1 --rounds 1 --threads 1 --int8 false"
).split()


def weights(name: str, path: Path) -> str:
    """A file of random weights by which images differ in their logits, as after a training."""
    models = pytest.importorskip("torchvision").models
    torch.manual_seed(0)
    net = models.get_model(name)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.8, 1.6)
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    torch.save(net.state_dict(), path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SIZES.items(), ids=list(SIZES))
def test_a_network_of_torchvision_gets_through_every_stage(
    tmp_path, monkeypatch, one_thread, blank_figures, name, size
):
    # TorchDynamo's captures take seconds for each network
    monkeypatch.setattr(shrink, "adapt", functools.partial(shrink.adapt, fused=False))
    for folder, count in (("train", 50), ("val", 8)):
        write_folder(tmp_path / folder, {"a": count, "b": count}, side=size)
    data = ["--data.train", str(tmp_path / "train"), "--data.val", str(tmp_path / "val")]
    model = ["--model", f"torchvision:{name}", "--weights", weights(name, tmp_path / "weights.pth")]
    out, sides = tmp_path / "out", ["--resolution", f"{size}", "--sizes", f"[{size}]"]
    assert main(["shrink", *model, *data, "--out", str(out), "--max_macs", "60%", *sides, *FLAGS]) == 0
    results = {path.parent.name: json.loads(path.read_text()) for path in (out / "networks").glob("*/result.json")}
    assert {"full", "small", "finetuned", "lower", "l1", "random-1"} <= set(results)
    assert results["small"]["macs"] <= 0.6 * results["full"]["macs"]
    for folder in ("export", "export/finetuned"):
        session = open_session((out / folder / "model.onnx").read_bytes(), threads=1)
        image = torch.zeros(1, 3, size, size).numpy()
        assert session.run([OUTPUT], {INPUT: image})[0].shape == (1, 2)
