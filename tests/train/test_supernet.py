"""What a method's preset leaves to the settings."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_space

from nasfast.config import ConfigError
from nasfast.settings.supernet import METHODS, SupernetConfig, default_lr
from nasfast.supernet import Supernet
from nasfast.train.supernet import make_supernet

ROLES = {
    ("indicators", False): {"block_indicators", "layer_indicators"},
    ("indicators", True): {"block_indicators", "layer_indicators", "classifier"},
    ("bn", False): {"block_indicators", "layer_indicators", "other_bn"},
    ("bn", True): {"block_indicators", "layer_indicators", "other_bn", "classifier"},
    ("all", False): {"block_indicators", "layer_indicators", "other_bn", "classifier", "convolutions"},
}


@pytest.mark.parametrize(("trainable", "classifier"), ROLES)
def test_what_trains(trainable, classifier):
    cfg = SupernetConfig(trainable=trainable, classifier=classifier, layer_indicators=True)
    net, _ = make_supernet(tiny_space(), "spos", cfg)
    assert set(net.summary.by_role) == ROLES[trainable, classifier]
    trains = {id(p) for p in net.parameters() if p.requires_grad}
    assert trains == {id(p) for role, ps in net.roles().items() if role in ROLES[trainable, classifier] for p in ps}
    assert default_lr(trainable) == {"indicators": 0.5, "bn": 0.4, "all": 0.1}[trainable]


@pytest.mark.parametrize("method", METHODS)
def test_null_takes_the_presets_value(method):
    preset = METHODS[method]
    chosen = SupernetConfig().resolved(method)
    for name in ("init", "layer_indicators", "trainable", "classifier", "sampler"):
        assert getattr(chosen, name) == getattr(preset, name)
    assert SupernetConfig(classifier=True).resolved(method).classifier


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
