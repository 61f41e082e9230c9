"""What a method's preset leaves to the settings."""

from __future__ import annotations

import pytest
import torch
from tiny import CHOICES, batches, tiny_space

from nasfast.config import ConfigError
from nasfast.settings import RunConfig, SpaceConfig, SupernetConfig, default_lr
from nasfast.spaces import SearchSpace, Stage
from nasfast.supernet import Supernet
from nasfast.train import TrainConfig
from nasfast.train import supernet as supernet_training
from nasfast.train.supernet import make_supernet, train_supernet


@pytest.mark.parametrize("classifier", [False, True])
@pytest.mark.parametrize("trainable", ["indicators", "bn", "all"])
def test_what_trains(trainable, classifier):
    cfg = SupernetConfig(trainable=trainable, classifier=classifier, layer_indicators=True)
    summary = make_supernet(tiny_space(), "spos", cfg)[0].summary
    assert summary == Supernet(tiny_space()).freeze(trainable, classifier=classifier)
    assert default_lr(trainable, 10) == {"indicators": 0.5, "bn": 0.4, "all": 0.1}[trainable]
    assert default_lr(trainable, 11) == {"indicators": 0.5, "bn": 0.05, "all": 0.1}[trainable]


def _space(layers: int) -> SearchSpace:
    return tiny_space(stages=(Stage(8, layers, 2, CHOICES),))


def test_the_learning_rate_of_the_space_is_resolved_and_a_given_one_stays(tmp_path):
    rate = lambda name, **train: (  # noqa: E731
        RunConfig(space=SpaceConfig(name=str(name)), train=TrainConfig(**train)).resolved().train.lr
    )
    (tmp_path / "deep.yaml").write_text(_space(11).to_yaml())
    assert [rate(name) for name in ("mobilenet_v2", "nas_bench_macro", tmp_path / "deep.yaml")] == [0.05, 0.4, 0.05]
    # that of an older run directory, too
    assert rate("mobilenet_v2", lr=0.4) == 0.4
    assert rate(tmp_path / "missing.yaml", lr=0.4) == 0.4
    with pytest.raises(ConfigError, match=r"there is no file .*missing\.yaml"):
        rate(tmp_path / "missing.yaml")


@pytest.mark.parametrize(("depth", "lr"), [(10, 0.4), (11, 0.05)])
def test_the_learning_rate_from_python_is_the_same(depth, lr, tmp_path, monkeypatch):
    space = _space(depth)
    net, sampler = make_supernet(space, "dinas")
    monkeypatch.setattr(supernet_training, "train", lambda net, loader, cfg, stage, **options: cfg.lr)
    assert train_supernet(net, batches(1), sampler, run_dir=tmp_path) == lr
    assert RunConfig.load(tmp_path / "config.yaml").train.lr == lr


def test_alignment_is_a_setting():
    net = lambda **form: make_supernet(tiny_space(), "spos", SupernetConfig(**form), seed=2)[0].state_dict()  # noqa: E731
    half, seven, default = (net(init="aligned", alignment=a) for a in (0.5, 0.7, None))
    name = "layers.0.candidates.0.depthwise.conv.weight"
    assert torch.equal(seven[name], default[name])
    assert not torch.equal(half[name], default[name])
    assert torch.equal(default[name], Supernet(tiny_space(), init="aligned", seed=2).state_dict()[name])


def test_wrong_alignments_are_refused():
    with pytest.raises(ConfigError, match=r"alignment must be from 0 to 1, got 1\.1"):
        SupernetConfig.from_dict({"alignment": 1.1})
    with pytest.raises(ValueError, match=r"alignment=0\.5 needs init='aligned', got init='he'"):
        SupernetConfig(alignment=0.5).resolved("spos")
