"""The measured step and the interleaved timing."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_space

from nasfast.config import ConfigError
from nasfast.measure.config import StepTimesConfig
from nasfast.measure.timing import TrainingStep, measure, measuring, random_batch
from nasfast.spaces import ArchError, mean_path
from nasfast.supernet import Supernet


def test_variants_are_interleaved_in_rotating_order():
    order = []

    def variant(name: str, seconds: float):
        return lambda: order.append(name) or {"step": seconds}

    found = measure({name: variant(name, s) for name, s in (("a", 1.0), ("b", 2.0), ("c", 3.0))}, rounds=3, warmup=1)
    assert "".join(order) == "abcbcacababc"
    assert found["b"] == {"step": {"median_ms": 2000.0, "q20_ms": 2000.0, "q80_ms": 2000.0}}


def small_step(trainable: str = "bn", **options) -> tuple[TrainingStep, Supernet]:
    space = tiny_space()
    net = Supernet(space).train()
    net.freeze(trainable)
    images, labels = random_batch(space, 4)
    return TrainingStep(net, images, labels, path=mean_path(space), **options), net


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_times_both_phases_and_leaves_gradients(bf16):
    step, net = small_step(bf16=bf16)
    times = step()
    assert times.keys() == {"forward", "backward", "step"}
    assert times["step"] == pytest.approx(times["forward"] + times["backward"])
    first = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    step()
    again = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert first.keys() == again.keys()
    # every call does the same work: gradients do not add up
    assert all(torch.equal(grad, again[name]) for name, grad in first.items())


def test_a_step_without_anything_to_train_is_refused():
    step, net = small_step()
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter on this path trains: choose another path or method"):
        step()


def test_settings_are_restored():
    before = torch.get_num_threads(), torch.backends.cudnn.benchmark
    with pytest.raises(KeyError), measuring(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert (torch.get_num_threads(), torch.backends.cudnn.benchmark) == before


def test_the_path_may_be_given():
    space, path = StepTimesConfig(space="digits_mini", path="0,1,2 3 4 5", resolution=64).resolve()
    assert (space.resolution, path) == (64, (0, 1, 2, 3, 4, 5))
    space, path = StepTimesConfig(space="digits_mini").resolve()
    assert (space.resolution, path) == (32, mean_path(space))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch": 0}, ValueError, "batch must be at least 1, got 0"),
        ({"device": "tpu"}, ValueError, "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        ({"path": "0 1"}, ArchError, "must have 6 values, got 2"),
        ({"batch": 1, "resolution": 8}, ConfigError, "batch 1 of 8 x 8 images.*raise batch or resolution"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        StepTimesConfig(**{"space": "digits_mini", **changes}).resolve()


def test_a_step_on_a_gpu_is_timed_by_events(gpu):
    space = tiny_space()
    net = Supernet(space).to(gpu).train()
    images, labels = random_batch(space, 4, device=gpu)
    times = TrainingStep(net, images, labels, path=mean_path(space))()
    assert times["step"] == pytest.approx(times["forward"] + times["backward"], rel=1e-3)
