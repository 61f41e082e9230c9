"""Freezing by role, paths, and agreement of a path with its standalone network."""

from __future__ import annotations

import random
from typing import get_args, get_type_hints

import pytest
import torch
from tiny import CHOICES, tiny_space
from torch.nn import functional as F

from nasfast.ops import reference
from nasfast.ops.modules import ACTIVATION_MODULES, BNAct2d
from nasfast.settings import SupernetConfig
from nasfast.spaces import SKIP, ArchError, FairSampler, Stage
from nasfast.spaces.blocks import Activation
from nasfast.supernet import Supernet, build, inherit, init


def images(space, count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(
        count, space.in_channels, space.resolution, space.resolution, generator=torch.Generator().manual_seed(3)
    )
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def trainable_names(net) -> set[str]:
    return {name for name, p in net.named_parameters() if p.requires_grad}


def affine(*names: str) -> set[str]:
    return {f"{name}.{part}" for name in names for part in ("weight", "bias")}


# by hand: the block indicators, and the layer indicators of the normal layers
INDICATOR_BNS = {
    "mbconv": [f"layers.{i}.candidates.{j}.project.bn" for i in range(4) for j in range(3)]
    + ["layers.1.layer_indicator", "layers.3.layer_indicator"],
    "shuffle": [f"layers.{i}.candidates.{j}.main.{2 if j < 2 else 5}.bn" for i in range(4) for j in range(3)]
    + ["layers.1.layer_indicator", "layers.3.layer_indicator"],
    "macro": [f"layers.{i}.candidates.{j}.project.bn" for i in range(4) for j in (1, 2)]
    + ["layers.0.candidates.0.unit.bn", "layers.2.candidates.0.unit.bn"]
    + ["layers.1.layer_indicator", "layers.3.layer_indicator"],
}


def names_of(space) -> set[str]:
    key = {"small_shuffle": "shuffle", "small_macro": "macro"}.get(space.name, "mbconv")
    return affine(*INDICATOR_BNS[key])


def test_what_each_choice_trains(small_space):
    net = Supernet(small_space)
    bns = affine(*(name for name, m in net.named_modules() if isinstance(m, torch.nn.BatchNorm2d)))
    classifier = affine("classifier") if small_space.classifier_bias else {"classifier.weight"}
    assert trainable_names(net) == names_of(small_space) < bns
    for trainable, with_classifier, expected in (
        ("bn", False, bns),
        ("bn", True, bns | classifier),
        ("all", False, {name for name, _ in net.named_parameters()}),
        ("indicators", True, names_of(small_space) | classifier),
        ("indicators", False, names_of(small_space)),
    ):
        net.freeze(trainable, classifier=with_classifier)
        assert trainable_names(net) == expected, trainable


def test_a_space_of_reduction_layers_remembers_that_indicators_were_asked_for():
    space = tiny_space(stages=(Stage(12, 1, 2, CHOICES),))
    assert Supernet(space, layer_indicators=True).layer_indicators
    assert not Supernet(space, layer_indicators=False).layer_indicators
    net = Supernet(space)
    assert net.roles()["layer_indicators"] == []
    assert net(images(space), FairSampler(space).step()[0]).shape == (4, 4)


def test_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="act must be one of .*, got 'gelu'"):
        Supernet(tiny_space(), activation="gelu")


def test_summary_numbers_and_text():
    """Block indicators of 3 x (8, 8, 12, 12) channels, layer indicators of 8 and 12; classifier 16 x 4 + 4."""
    net = Supernet(tiny_space())
    block, layer = 2 * 3 * (8 + 8 + 12 + 12), 2 * (8 + 12)
    assert net.summary.by_role == {"block_indicators": (24, block), "layer_indicators": (4, layer)}
    assert net.summary.elements == block + layer == 280
    assert net.summary.total_elements == sum(p.numel() for p in net.parameters())
    text = str(net.summary)
    assert text.startswith(f"trainable='indicators': 280 of {net.summary.total_elements:,} parameters (")
    assert text.endswith("block_indicators 24 tensors / 240, layer_indicators 4 tensors / 40")
    summary = net.freeze("indicators", classifier=True)
    assert summary is net.summary
    assert summary.by_role["classifier"] == (2, 68)


def test_unknown_trainable_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'indicators'"):
        Supernet(tiny_space()).freeze("indicator")


@pytest.mark.parametrize("trainable", ["indicators", "all"])
def test_only_the_path_gets_gradients(small_space, trainable):
    net = Supernet(small_space)
    net.freeze(trainable)
    path = FairSampler(small_space, seed=5).step()[0]
    net(images(small_space), path).square().mean().backward()
    got = {name for name, p in net.named_parameters() if p.grad is not None}
    on_path = set()
    for name, p in net.named_parameters():
        parts = name.split(".")
        if parts[0] != "layers":
            used = True
        else:
            layer, choice = small_space.layers[int(parts[1])], path[int(parts[1])]
            indicated = choice == layer.indicator_choice
            used = indicated if parts[2] == "layer_indicator" else not indicated and int(parts[3]) == choice
        if used and p.requires_grad:
            on_path.add(name)
    assert got == on_path
    assert got


def test_a_path_equals_its_inherited_network(small_space):
    net, rng = Supernet(small_space, seed=1), random.Random(0)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn(p.shape))
    net.double()
    x = images(small_space, 6, torch.float64)
    for _ in range(4):
        arch = tuple(rng.choice([c for c in u.options if c != u.indicator_choice]) for u in small_space.layers)
        torch.testing.assert_close(net(x, arch), inherit(net, arch).double().train()(x), rtol=1e-10, atol=1e-10)


def test_a_plain_supernet_is_the_same_network(small_space):
    """No operator of nasfast in it, the same state dict, the same result on every layer-indicator path."""
    fused, plain = Supernet(small_space), Supernet(small_space, fused=False)
    assert not [m for m in plain.modules() if isinstance(m, BNAct2d) or getattr(m, "fused", False)]
    state = plain.state_dict()
    assert state.keys() == fused.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in fused.state_dict().items())
    x = images(small_space)
    for path in ([layer.legal[-1] for layer in small_space.layers], [layer.legal[0] for layer in small_space.layers]):
        torch.testing.assert_close(plain(x, path), fused(x, path), rtol=1e-4, atol=1e-4)


def test_inherited_weights_are_copies():
    net = Supernet(tiny_space())
    network = inherit(net, (0, 1, 2, 0))
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(7.0)
    assert not any((p == 7.0).all() for p in net.parameters())
    assert [type(b).__name__ for b in network.blocks] == ["InvertedResidual"] * 4


def test_evaluation_uses_batch_statistics_too():
    net, x = Supernet(tiny_space()), images(tiny_space())
    torch.testing.assert_close(net.train()(x, (0,) * 4), net.eval()(x, (0,) * 4), rtol=0, atol=0)
    assert not list(net.buffers())


def test_layer_indicator_path_is_identity_and_batch_norm(small_space):
    net, x = Supernet(small_space), images(small_space)
    skip = small_space.layers[1].indicator_choice
    indicator = net.layers[1].layer_indicator
    with torch.no_grad():
        indicator.weight.uniform_(0.5, 2)
        indicator.bias.normal_()
    first, third, fourth = 1, 1, 1
    hidden = net.layers[0](net.stem(x), first)
    hidden = F.batch_norm(hidden, None, None, indicator.weight, indicator.bias, training=True, eps=indicator.eps)
    hidden = net.layers[3](net.layers[2](hidden, third), fourth)
    want = net.classifier(net.head(hidden).mean((2, 3)))
    torch.testing.assert_close(net(x, (first, skip, third, fourth)), want, rtol=1e-4, atol=1e-5)


def test_a_skipped_layer_without_indicator_passes_its_input_on():
    space = tiny_space()
    net, x = Supernet(space, layer_indicators=False), images(space)
    want = net.classifier(net.head(net.layers[2](net.layers[0](net.stem(x), 1), 2)).mean((2, 3)))
    torch.testing.assert_close(net(x, (1, SKIP, 2, SKIP)), want, rtol=0, atol=0)
    network = inherit(net, (1, SKIP, 2, SKIP))
    torch.testing.assert_close(network.train()(x), want, rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in network.parameters()) == space.cost((1, SKIP, 2, SKIP)).params


def test_pinned_layers_pass_their_input_on():
    space = tiny_space()
    pinned = space.replace(stages=(space.stages[0].replace(pinned=(1,)), space.stages[1]))
    net, x = Supernet(pinned), images(pinned)
    hidden = net.layers[0](net.stem(x), 2)
    want = net.classifier(net.head(net.layers[3](net.layers[2](hidden, 0), 1)).mean((2, 3)))
    torch.testing.assert_close(net(x, (2, SKIP, 0, 1)), want, rtol=0, atol=0)
    assert isinstance(build(pinned, (2, SKIP, 0, 1)).blocks[1], torch.nn.Identity)


def test_illegal_architectures_are_refused():
    space = tiny_space()
    with pytest.raises(ArchError, match="layer 2 .* choice -1"):
        build(space, (0, 0, SKIP, 0))
    with pytest.raises(ArchError, match="layer 1 .* choice 3"):
        Supernet(space)(images(space), (0, 3, 0, 0))
    with pytest.raises(ArchError, match="must have 4 values"):
        inherit(Supernet(space), (0, 0))


def test_stages_and_fixed_layers_may_have_their_own_activation():
    tiny = tiny_space()
    head = (tiny.head[0].replace(activation="silu"),)
    space = tiny.replace(stages=(tiny.stages[0], tiny.stages[1].replace(activation="hswish")), head=head)
    for act, net in (("relu6", Supernet(space)), ("tanh", Supernet(space, activation="tanh"))):
        parts = {
            "stem": act,
            "layers.0": act,
            "layers.1": act,
            "layers.2": "hswish",
            "layers.3": "hswish",
            "head": "silu",
        }
        for part, own in parts.items():
            acts = {m.act_name for m in net.get_submodule(part).modules() if hasattr(m, "conv")}
            assert acts == ({own} if part in ("stem", "head") else {own, "identity"}), part
        x, path = images(space, 4), (0, 1, 2, 0)
        torch.testing.assert_close(inherit(net, path).train()(x), net(x, path), rtol=1e-4, atol=1e-4)


def test_every_named_activation_has_its_operator():
    names = set(reference.ACTIVATIONS)
    assert set(get_args(Activation)) == names == set(ACTIVATION_MODULES) == set(init.GAINS)
    assert get_type_hints(SupernetConfig)["activation"] == Activation | None


def test_parameters_do_not_depend_on_the_layer_indicators():
    with_u, without = Supernet(mini := tiny_space(), seed=4), Supernet(mini, seed=4, layer_indicators=False)
    ours = with_u.state_dict()
    for name, tensor in without.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    assert not without.layer_indicators and not without.roles()["layer_indicators"]
    assert {n for n in ours if n not in without.state_dict()} == affine(
        "layers.1.layer_indicator", "layers.3.layer_indicator"
    )
