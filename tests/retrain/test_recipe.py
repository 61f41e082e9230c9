"""What people expect of a retraining: averaged weights, blended images, early stopping, more epochs, several seeds."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from tiny import batches, tiny_space
from torch import nn
from torch.nn import functional as F

from nasfast.engine import EagerEngine
from nasfast.retrain import RetrainConfig, load_model, retrain
from nasfast.retrain.retrain import mixing
from nasfast.supernet import build
from nasfast.train import CheckpointError, Evaluation, TrainConfig, TrainExtras, TrainStage, train
from nasfast.train.checkpoint import load_checkpoint
from nasfast.train.log import read_metrics

ARCH = (1, 0, 2, 1)
EVERY_STEP = TrainConfig(epochs=2, lr=0.1, checkpoint_every=1, keep_checkpoints=99, log_every=1)
TRAIN, VAL = batches(4), batches(2, seed=1)


@pytest.fixture(autouse=True, scope="module")
def threads(one_thread):
    """Runs are compared byte for byte."""


def run(out, cfg: RetrainConfig, *, images=TRAIN, **options):
    return retrain(tiny_space(), ARCH, images, VAL, cfg, run_dir=out, **options)


def saved(out) -> list:
    """The checkpoints of a run in the order of their steps."""
    return [load_checkpoint(p) for p in sorted((out / "checkpoints").glob("*[0-9].safetensors"))]


def test_the_average_is_that_of_the_formula(tmp_path):
    """w_1, then d * average + (1 - d) * w, for parameters and running statistics; it is what is judged and saved."""
    decay = 0.7
    result = run(tmp_path, RetrainConfig(ema=decay, train=EVERY_STEP))
    steps = saved(tmp_path)
    assert len(steps) == 8
    network = load_model(tmp_path / "retrain" / "best")
    kept = dict(network.state_dict())
    for name, last in steps[-1].part("model.").items():
        if not last.is_floating_point():
            continue
        average = steps[0].tensors[f"model.{name}"].double()
        for step in steps[1:]:
            average = decay * average + (1 - decay) * step.tensors[f"model.{name}"].double()
        torch.testing.assert_close(kept[name].double(), average, rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(kept[name], last), name
    right = torch.cat([network(x).argmax(1) == y for x, y in VAL])
    assert result.top1 == right.double().mean().item()


# --- blended images


def blended(cfg: RetrainConfig, x, y):
    torch.manual_seed(3)
    return mixing(cfg, 4)(x, y)


def test_mixup_blends_labels_as_images():
    """The share is measured on the images, by least squares, and does not come from the transform."""
    x, y = batches(1, size=6)[0]
    mixed, labels = blended(RetrainConfig(mixup=0.8), x, y)
    other, of_other = x.roll(1, 0), y.roll(1, 0)
    share = (((mixed - other) * (x - other)).sum() / (x - other).square().sum()).item()
    assert 0.01 < share < 0.99
    torch.testing.assert_close(mixed, share * x + (1 - share) * other, rtol=1e-4, atol=1e-5)
    wanted = share * F.one_hot(y, 4) + (1 - share) * F.one_hot(of_other, 4)
    torch.testing.assert_close(labels, wanted, rtol=1e-4, atol=1e-5)


def test_cutmix_blends_labels_by_area():
    x, y = batches(1, size=6)[0]
    mixed, labels = blended(RetrainConfig(cutmix=1.0), x, y)
    other = x.roll(1, 0)
    own = (mixed == x).all(1)
    assert torch.equal(own | (mixed == other).all(1), torch.ones_like(own)), "a pixel is of neither image"
    share = own.double().mean((1, 2))
    assert share.unique().numel() == 1
    assert 0 < share[0] < 1
    wanted = share[:, None] * F.one_hot(y, 4) + (1 - share[:, None]) * F.one_hot(y.roll(1, 0), 4)
    torch.testing.assert_close(labels.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities_have_the_gradient_of_their_cross_entropy(smoothing):
    """Against the sum of -p log q by hand; a prediction is correct if it is the most probable class."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 4), torch.randn(6, 5)
    p = torch.rand(6, 4).softmax(1)
    result = EagerEngine(model, label_smoothing=smoothing).forward_backward(x, p, None)
    q = model(x).double().softmax(1)
    loss = -((p.double() * (1 - smoothing) + smoothing / 4) * q.log()).sum(1).mean()
    wanted = torch.autograd.grad(loss, model.weight)[0]
    torch.testing.assert_close(model.weight.grad.double(), wanted.double(), rtol=1e-5, atol=1e-6)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert result.correct.item() == (q.argmax(1) == p.argmax(1)).sum().item()


def test_the_training_sees_what_is_blended(tmp_path):
    """One step of plain SGD on the blended batch gives the weights of the first checkpoint."""
    cfg = RetrainConfig(mixup=1.0, train=EVERY_STEP.replace(epochs=1, clip_norm=0.0, weight_decay=0.0))
    run(tmp_path, cfg, images=TRAIN[:1], seed=5)
    network = build(tiny_space(), ARCH, seed=5).train()
    torch.manual_seed(5)
    x, p = mixing(cfg, 4)(*TRAIN[0])
    F.cross_entropy(network(x), p, label_smoothing=0.1).backward()
    got = saved(tmp_path)[0].part("model.")
    for name, weight in network.named_parameters():
        torch.testing.assert_close(got[name], weight.detach() - 0.1 * weight.grad, rtol=1e-4, atol=1e-5, msg=name)


# --- early stopping


def judged(out, accuracies: list[float], *, resume: bool = False, epochs: int = 9, extends: bool = False, **extras):
    """Train with these accuracies after the epochs; returns the model and the last checkpoint."""
    torch.manual_seed(0)
    model = build(tiny_space(), ARCH, seed=1)

    def evaluate(network):
        steps = next(m for m in network.modules() if isinstance(m, nn.BatchNorm2d)).num_batches_tracked
        epoch = round(int(steps) / len(TRAIN))
        return Evaluation(accuracies[epoch - 1], 1.0, 1.0, 16)

    stage = TrainStage("retrain/best", out, "f", resume=resume, extends=extends)
    cfg = TrainConfig(epochs=epochs, lr=0.1, keep_checkpoints=99)
    return model, train(model, TRAIN, cfg, stage, evaluate=evaluate, extras=TrainExtras(**extras))


def assert_weights(model, checkpoint, part: str = "model."):
    wanted = load_checkpoint(checkpoint).part(part)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


ACCURACIES = [0.3, 0.5, 0.4, 0.5, 0.6, 0.1, 0.1, 0.1, 0.1]


def test_it_stops_after_evaluations_without_a_better_one_and_keeps_the_best(tmp_path, caplog):
    caplog.set_level("INFO", "nasfast")
    model, final = judged(tmp_path, ACCURACIES, patience=2)
    assert final.name == "retrain-best-00000016.safetensors", "0.5 again after four epochs is not better"
    assert_weights(model, tmp_path / "checkpoints" / "retrain-best-00000008.safetensors")
    assert "retrain/best: stopped after 4 of 9 epochs, because 2 evaluations were not better" in caplog.text
    assert "the best top-1, 50.00%" in caplog.text
    before = {p.name: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}
    again, same = judged(tmp_path, [1.0] * 9, resume=True, patience=2)
    assert same == final, "a training that has stopped goes on"
    assert_weights(again, tmp_path / "checkpoints" / "retrain-best-00000008.safetensors")
    assert {p.name: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()} == before


def test_more_patience_finds_a_later_best_and_none_keeps_the_last(tmp_path):
    model, final = judged(tmp_path / "3", ACCURACIES, patience=3)
    assert final.name == "retrain-best-00000032.safetensors"
    assert_weights(model, tmp_path / "3" / "checkpoints" / "retrain-best-00000020.safetensors")
    model, final = judged(tmp_path / "none", ACCURACIES)
    assert final.name == "retrain-best-00000036.safetensors"
    assert_weights(model, final)


def test_the_best_average_is_kept(tmp_path):
    """The average of the best evaluation, and not its last weights."""
    model, _ = judged(tmp_path, [0.5, 0.1, *ACCURACIES], patience=1, ema=0.6)
    best = tmp_path / "checkpoints" / "retrain-best-00000004.safetensors"
    assert_weights(model, best, "average.module.")
    assert not torch.equal(model.classifier.weight, load_checkpoint(best).tensors["model.classifier.weight"])


def test_a_damaged_best_checkpoint_is_named(tmp_path):
    judged(tmp_path, ACCURACIES, patience=2)
    best = tmp_path / "checkpoints" / "retrain-best-best.safetensors"
    best.unlink()
    with pytest.raises(CheckpointError, match="-best.safetensors is not a readable.*train again"):
        judged(tmp_path, ACCURACIES, patience=2, resume=True)


def test_a_retraining_records_where_it_stopped(tmp_path):
    """The labels of the validation images are noise, so it stops at once."""
    cfg = RetrainConfig(patience=1, train=TrainConfig(epochs=9, lr=1e-9))
    result = run(tmp_path, cfg)
    assert (result.epochs, result.stopped_after) == (9, 2)
    assert json.loads((tmp_path / "retrain/best/result.json").read_text())["stopped_after"] == 2
    assert result.settings == cfg.replace(train=cfg.train.replace(precision="fp32"))  # what auto means on a CPU
    assert run(tmp_path, cfg, resume=True) == result
    assert run(tmp_path / "all", cfg.replace(patience=None)).stopped_after is None


# --- more epochs


def test_a_finished_retraining_is_extended_along_the_longer_cosine(tmp_path, caplog):
    caplog.set_level("INFO", "nasfast")
    cfg = RetrainConfig(train=EVERY_STEP)
    short = run(tmp_path, cfg)
    longer = cfg.replace(train=EVERY_STEP.replace(epochs=3))
    result = run(tmp_path, longer, resume=True)
    assert (short.epochs, result.epochs) == (2, 3)
    rates = {m["step"]: m["lr"] for m in read_metrics(tmp_path) if "lr" in m}
    for step in range(1, 13):
        total = 8 if step <= 8 else 12
        assert rates[step] == pytest.approx(0.05 * (1 + math.cos(math.pi * (step - 1) / total)), rel=1e-12), step
    assert rates[9] == pytest.approx(0.1 / 4)
    assert "retrain/best: extended from 2 to 3 epochs: from step 8 on, the learning rate" in caplog.text
    assert len(saved(tmp_path)) == 12
    assert json.loads((tmp_path / "retrain/best/result.json").read_text())["epochs"] == 3
    with pytest.raises(CheckpointError, match="of 3 epochs, now there are 2: it can be extended, not shortened"):
        run(tmp_path, cfg, resume=True)
    with pytest.raises(CheckpointError, match=r"train.lr was 0.1, now 0.2"):
        run(tmp_path, cfg.replace(train=EVERY_STEP.replace(epochs=4, lr=0.2)), resume=True)


def test_one_that_stopped_early_is_extended_with_fresh_patience(tmp_path):
    judged(tmp_path, ACCURACIES, patience=2)
    _, final = judged(tmp_path, ACCURACIES, patience=2, epochs=12, resume=True, extends=True)
    assert final.name == "retrain-best-00000028.safetensors", "0.6 after the fifth epoch, then two without a better one"


# --- resuming


class Interrupted:
    """Batches that are interrupted before number `at`, counted over epochs, as by Ctrl-C."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __len__(self) -> int:
        return len(TRAIN)

    def __iter__(self):
        for batch in TRAIN:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


EVERYTHING = RetrainConfig(
    ema=0.8, mixup=0.4, cutmix=1.0, patience=9, train=TrainConfig(epochs=3, lr=0.1, checkpoint_every=3, log_every=2)
)


def contents(out) -> dict:
    """Every file that a resumed retraining must reproduce."""
    files = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*.safetensors")}
    files["result"] = {**json.loads((out / "retrain/best/result.json").read_text()), "seconds": 0}
    files["metrics"] = [{k: v for k, v in m.items() if k != "images_per_s"} for m in read_metrics(out)]
    return files


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    run(out, EVERYTHING)
    return out


@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_resumed_retraining_ends_with_the_same_bytes(tmp_path, unbroken, at):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, EVERYTHING, images=Interrupted(at))
    torch.manual_seed(77)
    run(tmp_path, EVERYTHING, resume=True)
    assert contents(tmp_path) == contents(unbroken)


def test_an_interrupted_extension_ends_with_the_same_bytes(tmp_path, unbroken):
    longer = EVERYTHING.replace(train=EVERYTHING.train.replace(epochs=5))
    for name in ("whole", "broken"):
        shutil.copytree(unbroken, tmp_path / name)
    run(tmp_path / "whole", longer, resume=True)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", longer, images=Interrupted(5), resume=True)
    run(tmp_path / "broken", longer, resume=True)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert contents(tmp_path / "whole")["result"]["epochs"] == 5


def test_another_recipe_does_not_continue_this_one(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"ema was 0.8, now 0.9; mixup was 0.4, now None"):
        run(tmp_path / "run", EVERYTHING.replace(ema=0.9, mixup=None), resume=True)
