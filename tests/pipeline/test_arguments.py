"""What is said of an argument of a wrong type, where a right one comes from, and of settings that cannot be."""

from __future__ import annotations

import pytest
from tiny import batches, tiny_space

import nasfast
from nasfast.config import ConfigError
from nasfast.retrain import retrain
from nasfast.settings import DataConfig, RetrainConfig, RunConfig, TaskSettings
from nasfast.spaces import ArchError, FairSampler
from nasfast.supernet import Supernet
from nasfast.train import TrainConfig, train_supernet
from nasfast.train.supernet import make_supernet

SPACE = tiny_space()
ARCH = (0,) * len(SPACE)


def net():
    return Supernet(SPACE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nasfast.score(None), "net must be of type Supernet, got NoneType"),
        (lambda: nasfast.search_table("indicators.json", SPACE), "table must be of type IndicatorTable, got str"),
        (lambda: nasfast.search_table(nasfast.score(net()), "tiny"), "space must be of type LayerSpace, got str"),
        (lambda: nasfast.rank([0.9], {}, SPACE), "accuracies must be of type Mapping, got list"),
        (lambda: nasfast.run({}), "cfg must be of type RunConfig, got dict: RunConfig.load"),
        (lambda: train_supernet(net(), [], FairSampler(SPACE), {}), "cfg must be of type TrainConfig, got dict"),
        (lambda: retrain(SPACE, ARCH, [], [], TrainConfig(), run_dir="x"), "cfg must be of type RetrainConfig, got"),
    ],
)
def test_arguments_of_another_type_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("arch", ["0 1", None])
def test_an_architecture_that_is_no_sequence_of_integers_is_refused(arch):
    with pytest.raises(ArchError, match=f"must have {len(SPACE)} integers, got .*`space.parse` reads text"):
        nasfast.build(SPACE, arch)


def test_settings_from_python_are_converted_as_those_of_files(tmp_path):
    assert TrainConfig(lr="4e-5").lr == 4e-5
    assert RunConfig(train={"epochs": 3}).train == TrainConfig(epochs=3)
    smallest = nasfast.search_table(nasfast.score(net()), SPACE, max_macs="5G", top_k=1)
    assert smallest == nasfast.search_table(nasfast.score(net()), SPACE, top_k=1)
    with pytest.raises(ConfigError, match="'epochs': expected a whole number, got '5'"):
        TrainConfig(epochs="5")
    with pytest.raises(ConfigError, match="'method': got 'greedy', allowed: 'auto', 'exact', 'evolution'"):
        nasfast.search_table(nasfast.score(net()), SPACE, method="greedy")
    with pytest.raises(ValueError, match="unknown method 'dina'; did you mean 'dinas'"):
        make_supernet(SPACE, "dina")


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda', but torch sees no GPU"):
        train_supernet(net(), batches(1, size=4), FairSampler(SPACE), run_dir=tmp_path / "run", device="cuda")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        (RunConfig, {"threads": -3}, "threads"),
        (RunConfig, {"seed": -1}, "seed"),
        (RunConfig, {"recalibration_batches": 0}, "recalibration_batches"),
        (RunConfig, {"device": "banana"}, "device"),
        (DataConfig, {"batch_size": 1}, "batch_size must be at least 2"),
        (DataConfig, {"val_fraction": 0.0}, "val_fraction must be between 0 and 1"),
        (DataConfig, {"workers": -1}, "must not be negative"),
        (DataConfig, {"augment": "imagnet"}, "'imagnet', allowed: 'auto', 'imagenet'"),
        (DataConfig, {"mean": [0.5, float("nan"), 0.5]}, "mean must be finite, got .*nan"),
        (DataConfig, {"std": [0.5, 0.0, 0.5]}, r"std must be positive and finite, got \(0.5, 0.0, 0.5\)"),
        (RetrainConfig, {"top_k": 0}, "top_k must be at least 1"),
        (RetrainConfig, {"random_architectures": -1}, "random_architectures must not be negative, got -1"),
        (RetrainConfig, {"ema": 0.0}, "ema must be between 0 and 1, e.g. 0.999, got 0.0"),
        (RetrainConfig, {"ema": float("nan")}, "ema must be between 0 and 1"),
        (RetrainConfig, {"mixup": 0.0}, "mixup must be positive, e.g. 0.2, got 0.0; null switches it off"),
        (RetrainConfig, {"patience": 0}, "patience must be at least 1, got 0; null trains all epochs"),
        (RetrainConfig, {"seeds": 0}, "seeds must be at least 1"),
        (RetrainConfig, {"auto_augment": "randaug"}, "'randaugment'"),
        (TaskSettings, {"workers": -1}, "workers"),
        (TaskSettings, {"attempts": 0}, "attempts"),
        (TaskSettings, {"max_hours": 0.0}, "max_hours"),
        (TaskSettings, {"max_hours": 1e9}, "max_hours must be positive and at most 1,000,000, got"),
        (TaskSettings, {"ray_address": "a:1"}, "--executor ray"),
    ],
)
def test_settings_that_cannot_be(kind, form, message):
    with pytest.raises(ConfigError, match=message):
        kind.from_dict(form)
