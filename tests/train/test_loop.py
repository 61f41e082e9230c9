"""The training loop: what a step does, what is logged, when it stops, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import Fixed, batches, net_and_sampler, tiny_space
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from nasfast.config import ConfigError
from nasfast.spaces import FairSampler, digits_mini
from nasfast.supernet import Supernet, build
from nasfast.train import Evaluation, TrainConfig, TrainingDivergedError, TrainStage, train, train_supernet
from nasfast.train import loop as loop_module
from nasfast.train.checkpoint import CheckpointFolder, encode, load_checkpoint
from nasfast.train.log import read_metrics
from nasfast.train.loop import make_optimizer
from nasfast.train.schedule import lr_at

PLAIN = TrainConfig(epochs=1, lr=1.0, momentum=0.0, weight_decay=0.0, label_smoothing=0.0, clip_norm=0.0)


def values(net) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def gradients(net, path, x, y, **loss) -> dict[str, torch.Tensor]:
    """The gradients of one path; zero for parameters off it."""
    net.zero_grad()
    F.cross_entropy(net(x, path), y, **loss).backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
    net.zero_grad()
    return found


def moved(net, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: before[name] - p.detach() for name, p in net.named_parameters()}


# a step


def test_gradients_of_several_paths_add_up(tmp_path):
    net, sampler = net_and_sampler((0, 1, 2, -1), (1, -1, 2, 0), (2, 0, 0, 1))
    before, (loader) = values(net), batches(1)
    each = [gradients(net, path, *loader[0]) for path in sampler.paths]
    train_supernet(net, loader, sampler, PLAIN, run_dir=tmp_path)
    for name, change in moved(net, before).items():
        torch.testing.assert_close(
            change, sum(g[name] for g in each), rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    # candidate 2 of layer 2 is on two paths: its change is neither gradient alone
    name = "layers.2.candidates.2.project.bn.weight"
    assert not torch.allclose(moved(net, before)[name], each[0][name], rtol=0.05)


def test_momentum_does_not_carry_a_candidate_through_the_steps_of_others(tmp_path):
    """A candidate sampled at the first step only keeps the value that step gave it."""
    net, _ = net_and_sampler(trainable="all")
    seen = []

    class Changing(Fixed):
        def step(self):
            seen.append(values(net))
            return [(0, 0, 0, 0) if len(seen) == 1 else (1, 1, 1, 1)]

    train_supernet(
        net, batches(3), Changing(net.space), TrainConfig(epochs=1, lr=0.1, weight_decay=0.1), run_dir=tmp_path
    )
    once = [name for name in seen[0] if ".candidates.0." in name]
    assert any((seen[1][name] != seen[0][name]).any() for name in once)
    final = values(net)
    assert all(torch.equal(final[name], seen[1][name]) for name in once)
    assert not torch.equal(final["stem.0.conv.weight"], seen[1]["stem.0.conv.weight"])


def test_clipping_shortens_the_whole_gradient(tmp_path):
    path = (0, 1, 2, 0)
    net, sampler = net_and_sampler(path)
    loader = batches(1)
    gradient = gradients(net, path, *loader[0])
    norm = math.sqrt(sum(g.double().square().sum().item() for n, g in gradient.items() if "bn" in n and "project" in n))
    limit = norm / 10
    before = values(net)
    train_supernet(net, loader, sampler, PLAIN.replace(clip_norm=limit), run_dir=tmp_path)
    for name, p in net.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(before[name] - p.detach(), gradient[name] / 10, rtol=1e-3, atol=1e-6)


def test_decay_pulls_weights_only(tmp_path):
    """Zero images give zero gradients to the classifier's weight: decay alone moves it."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    before = values(network)
    images, labels = torch.zeros(8, 3, 2, 2), torch.arange(8) % 4
    cfg = PLAIN.replace(lr=0.5, weight_decay=0.1)
    train(network, [(images, labels)], cfg, TrainStage("x", tmp_path, "f"))
    torch.testing.assert_close(network[1].weight.detach(), before["1.weight"] * (1 - 0.5 * 0.1))
    bias = before["1.bias"].requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(bias.expand(8, 4), labels), bias)
    torch.testing.assert_close(network[1].bias.detach(), bias.detach() - 0.5 * gradient)


def test_only_what_requires_grad_gets_an_optimiser():
    net = Supernet(tiny_space())
    (group,) = make_optimizer(net, TrainConfig(lr=0.1, momentum=0.8, nesterov=True)).param_groups
    assert (group["momentum"], group["nesterov"], group["weight_decay"]) == (0.8, True, 0.0)
    assert {id(p) for p in group["params"]} == {id(p) for p in net.parameters() if p.requires_grad}
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(net, TrainConfig(lr=0.1))


def test_paths_take_turns_under_fused_sgd_which_a_gpu_has(monkeypatch):
    """PyTorch's refuses momenta of which some are not there yet."""
    trained = []
    for on_gpu in (False, True):
        if on_gpu:
            monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
        net, sampler = net_and_sampler((0, 1, 2, -1), (1, 1, 2, 0), (0, -1, 0, 1))
        optimizer = make_optimizer(net, cfg := TrainConfig(epochs=1, lr=0.1, momentum=0.9))
        assert optimizer.defaults["fused"] is (True if on_gpu else None)
        for (images, labels), path in zip(batches(3), sampler.paths, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(images, path), labels).backward()
            loop_module.update(optimizer, cfg.clip_norm)
        trained.append(values(net))
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_learning_rate_must_be_chosen_before_anything_is_written(tmp_path):
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    with pytest.raises(ValueError, match="lr is not set: give a learning rate"):
        train(network, batches(1), TrainConfig(), TrainStage("x", tmp_path / "run", "f"))
    assert not any(tmp_path.iterdir())


def test_a_path_without_trainable_parameters_is_a_step_without_change(tmp_path):
    space = tiny_space()
    net = Supernet(space, layer_indicators=False)
    for role, parameters in net.roles().items():
        for p in parameters:
            p.requires_grad_(role == "block_indicators" and p is parameters[0])
    before = values(net)
    train_supernet(net, batches(1), _unmarked(space), PLAIN, run_dir=tmp_path)
    assert not any(d.any() for d in moved(net, before).values())


def _unmarked(space):
    sampler = Fixed(space, (1, 1, 1, 1))
    sampler.layer_indicators = False
    return sampler


def test_bf16_runs_and_stays_near_fp32(tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        net, sampler = net_and_sampler()
        cfg = TrainConfig(epochs=2, lr=0.1, precision=precision, log_every=1)
        train_supernet(net, batches(5), sampler, cfg, run_dir=tmp_path / precision)
        losses[precision] = [m["loss"] for m in read_metrics(tmp_path / precision)]
        assert all(p.dtype == torch.float32 for p in net.parameters())
    # bfloat16 has 8 significant bits; some ten roundings on the way to a loss of about 1.5
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    assert losses["bf16"] != losses["fp32"]


# metrics


def test_metrics_of_every_step_by_hand(tmp_path):
    """The loss before any update, its accuracy and the learning rate; then averages over the window."""
    path, loader = (0, 1, 2, 0), batches(4)
    net, sampler = net_and_sampler(path)
    logits = net(loader[0][0], path)
    cfg = TrainConfig(epochs=2, lr=0.3, log_every=1, warmup_epochs=0.5)
    train_supernet(net, loader, sampler, cfg, run_dir=tmp_path / "one")
    lines = read_metrics(tmp_path / "one")
    assert [m["step"] for m in lines] == list(range(1, 9))
    assert [m["epoch"] for m in lines] == [0] * 4 + [1] * 4
    assert [m["lr"] for m in lines] == [lr_at(s, total=8, peak=0.3, warmup=2) for s in range(8)]
    assert all(m["stage"] == "supernet" and m["images_per_s"] > 0 for m in lines)
    assert lines[0]["loss"] == pytest.approx(
        F.cross_entropy(logits, loader[0][1], label_smoothing=0.1).item(), rel=1e-5
    )
    assert lines[0]["top1"] == (logits.argmax(1) == loader[0][1]).float().mean().item()

    net, sampler = net_and_sampler(path)
    train_supernet(net, loader, sampler, cfg.replace(log_every=3), run_dir=tmp_path / "three")
    windows = read_metrics(tmp_path / "three")
    assert [m["step"] for m in windows] == [3, 4, 6, 8]
    for window, steps in zip(windows, ([0, 1, 2], [3], [4, 5], [6, 7]), strict=True):
        for key in ("loss", "top1"):
            assert window[key] == pytest.approx(sum(lines[s][key] for s in steps) / len(steps), rel=1e-6)


def test_evaluation_lines(tmp_path):
    seen = []

    def evaluate(model) -> Evaluation:
        seen.append(model.training)
        return Evaluation(0.5, 0.75, 1.25, 8)

    cfg = TrainConfig(epochs=5, lr=0.1, eval_every=2)
    network = build(tiny_space(), (0, 1, 2, 0))
    train(network, batches(2), cfg, TrainStage("retrain/best", tmp_path, "f"), evaluate=evaluate)
    lines = [m for m in read_metrics(tmp_path) if "eval_top1" in m]
    assert [m["step"] for m in lines] == [4, 8, 10]
    assert lines[0] == {"stage": "retrain/best", "step": 4, "eval_top1": 0.5, "eval_top5": 0.75, "eval_loss": 1.25}
    assert len(seen) == 3
    assert list((tmp_path / "tensorboard" / "retrain" / "best").glob("events.*"))
    assert (tmp_path / "checkpoints" / "retrain-best-00000010.safetensors").exists()


def test_the_best_evaluation_keeps_its_checkpoint(tmp_path):
    """Top-1 of 0.2, 0.7, 0.5, 0.7 after steps 2, 4, 6, 8: the first of equals."""
    scores = iter((0.2, 0.7, 0.5, 0.7))
    network = build(tiny_space(), (0, 1, 2, 0))
    cfg = TrainConfig(epochs=4, lr=0.1, keep_checkpoints=1, checkpoint_every=3)
    train(
        network,
        batches(2),
        cfg,
        TrainStage("retrain/a", tmp_path, "f"),
        evaluate=lambda _: Evaluation(next(scores), 1.0, 1.0, 8),
    )
    files = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert files == {"retrain-a-00000008.safetensors", "retrain-a-best.safetensors"}
    best = load_checkpoint(tmp_path / "checkpoints" / "retrain-a-best.safetensors")
    assert (best.state["step"], best.state["best"]) == (4, 0.7)
    last = load_checkpoint(tmp_path / "checkpoints" / "retrain-a-00000008.safetensors")
    assert (last.state["step"], last.state["best"]) == (8, 0.7)


def test_what_is_saved_is_a_copy_of_what_trains(tmp_path, monkeypatch):
    """A checkpoint that is written late still has the weights and the momentum of its step."""
    kept = {}

    def save(folder, step, checkpoint, *, best=False):
        kept[step] = checkpoint, encode(checkpoint)

    monkeypatch.setattr(CheckpointFolder, "save", save)
    net, sampler = net_and_sampler()
    train_supernet(net, batches(4), sampler, TrainConfig(epochs=1, lr=0.5, checkpoint_every=1), run_dir=tmp_path)
    assert sorted(kept) == [1, 2, 3, 4]
    assert all(encode(checkpoint) == then for checkpoint, then in kept.values())
    assert len({then for _, then in kept.values()}) == 4
    name = "layers.1.candidates.0.project.conv.weight"
    fixed = dict(net.named_parameters())[name]
    assert kept[1][0].tensors[f"model.{name}"].data_ptr() == fixed.data_ptr(), "what does not train is copied too"


# stopping


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_batch_stops_and_keeps_the_last_good_checkpoint(tmp_path, poison):
    net, sampler = net_and_sampler()
    loader = batches(8)
    loader[5] = (torch.full_like(loader[5][0], poison), loader[5][1])
    cfg = TrainConfig(epochs=1, lr=0.1, checkpoint_every=2, log_every=1)
    with pytest.raises(TrainingDivergedError, match="loss nan.*at step 6 of 8") as error:
        train_supernet(net, loader, sampler, cfg, run_dir=tmp_path)
    last = tmp_path / "checkpoints" / "supernet-00000004.safetensors"
    assert str(last) in str(error.value)
    assert "Lower lr (0.1) or clip_norm (5.0)" in str(error.value)
    assert max((tmp_path / "checkpoints").iterdir()) == last
    assert all(t.isfinite().all() for t in load_checkpoint(last).part("model.").values())
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]

    net, sampler = net_and_sampler()
    final = train_supernet(net, batches(8), sampler, cfg, run_dir=tmp_path, resume=True)
    assert final.name == "supernet-00000008.safetensors"


def test_a_loader_shorter_than_its_length(tmp_path):
    class Short:
        def __len__(self):
            return 4

        def __iter__(self):
            return iter(batches(3))

    net, sampler = net_and_sampler()
    with pytest.raises(RuntimeError, match="loader has length 4 but epoch 0 ended after 3 batches"):
        train_supernet(net, Short(), sampler, TrainConfig(epochs=1, lr=0.1), run_dir=tmp_path)


def test_a_loader_without_batches_replaces_nothing(tmp_path):
    net, sampler = net_and_sampler()
    cfg = TrainConfig(epochs=1, lr=0.1)
    last = train_supernet(net, batches(1), sampler, cfg, run_dir=tmp_path)
    none = DataLoader(TensorDataset(*batches(1)[0]), batch_size=1000, drop_last=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ValueError, match="a loader has no batch: a DataLoader with drop_last=True"):
        train_supernet(net, none, sampler, cfg, run_dir=tmp_path, overwrite=True)
    assert last.exists() and before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


# arguments


def test_sampler_and_supernet_must_agree(tmp_path):
    net = Supernet(tiny_space(), layer_indicators=False)
    with pytest.raises(ValueError, match="sampler draws layer-indicator paths, the supernet has none"):
        train_supernet(net, batches(1), FairSampler(tiny_space()), PLAIN, run_dir=tmp_path)
    with pytest.raises(ValueError, match="sampler draws from space 'digits_mini', the supernet has space 'tiny'"):
        train_supernet(net, batches(1), FairSampler(digits_mini()), PLAIN, run_dir=tmp_path)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"epochs": 0}, "epochs must be positive"),
        ({"lr": -1}, "lr must be positive"),
        ({"momentum": -0.1}, "momentum must not be negative"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
        ({"keep_checkpoints": 0}, "keep_checkpoints must be positive"),
        ({"precision": "fp16"}, "'fp16', allowed: 'auto', 'fp32', 'bf16'"),
        ({"warmup": 1}, "did you mean 'warmup_epochs'"),
    ],
)
def test_settings_that_cannot_be(form, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(form)


@pytest.mark.parametrize("sampled", [False, True])
def test_only_ranks_on_the_same_path_may_leave_parameters_out(sampled, tmp_path, monkeypatch):
    seen, exchange = [], loop_module.exchange

    def exchanged(*arguments, same_path, **options):
        seen.append(same_path)
        return exchange(*arguments, same_path=same_path, **options)

    monkeypatch.setattr(loop_module, "exchange", exchanged)
    net, sampler = net_and_sampler()
    if not sampled:
        net, sampler = build(tiny_space(), (0,) * len(tiny_space().layers)), None
    train(net, batches(1), PLAIN, TrainStage("supernet", tmp_path, "f"), sampler=sampler)
    assert seen == [sampled]
