"""Where BatchNorms begin, and what that does to a deep supernet."""

from __future__ import annotations

import pytest
import torch
from tiny import CHOICES, tiny_space
from torch import nn
from torch.nn import functional as F

from nasfast.settings import SupernetConfig
from nasfast.spaces import Block, FairSampler, Stage, nas_bench_macro
from nasfast.supernet import InitScheme, Supernet
from nasfast.train.supernet import make_supernet

# twelve layers, of which three are reductions
DEEP = tiny_space(resolution=32, stages=tuple(Stage(width, 4, 2, CHOICES) for width in (24, 32, 48)))
FORMER = SupernetConfig(alignment=0.7, linear_share=0.85, shift=0.0, branch_scale=1.0)


def norms(net: nn.Module) -> dict[str, nn.BatchNorm2d]:
    return {name: module for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)}


@pytest.mark.parametrize("activation", ["relu", "relu6", "hswish", "tanh"])
def test_betas_before_activations_and_gammas_behind_branches(activation):
    shift = 0.0 if activation == "tanh" else 0.75
    net = Supernet(tiny_space(), init=InitScheme(shift=0.75, branch_scale=0.25), activation=activation)
    residual = {f"layers.{i}.candidates.{j}.project.bn" for i, layer in enumerate(net.space.layers) if layer.normal
                for j in range(len(layer.choices))}  # fmt: skip
    assert residual
    (*_, last) = [name for name in norms(net) if name.startswith("head")]
    for name, norm in norms(net).items():
        acts = "project" not in name and "indicator" not in name and name != last
        assert (norm.bias == (shift if acts else 0.0)).all(), name
        assert (norm.weight == (0.25 if name in residual else 1.0)).all(), name


def test_without_a_head_the_last_unit_of_each_last_candidate_keeps_its_beta():
    choices = (Block("conv", 3), Block("shuffle", 3), Block("identity"), Block("conv", 1))
    space = tiny_space(stages=(Stage(8, 2, 1, choices),), head=())
    net = Supernet(space, init=InitScheme(shift=0.75))
    shifted = {name: norm.bias.mean().item() for name, norm in norms(net).items() if "layers" in name}
    last = [name for name in shifted if name.startswith("layers.1")]
    assert [shifted[name] for name in last if ".candidates.0" in name or ".candidates.3" in name] == [0.0, 0.0]
    assert [shifted[name] for name in last if ".candidates.1" in name][-1] == 0.0
    assert {shifted[name] for name in shifted if "layers.0.candidates.0" in name} == {0.75}


def test_shallow_spaces_keep_their_weights_and_deep_ones_have_others():
    for space in (nas_bench_macro(), DEEP.replace(stages=DEEP.stages[:2])):
        assert make_supernet(space, "dinas")[0].init == "aligned"
    chosen = InitScheme(depthwise="unit_norm", alignment=0.9, linear_share=0.95, shift=1.0, branch_scale=0.3)
    net, _ = make_supernet(DEEP, "dinas", seed=3)
    assert net.init == chosen
    same = Supernet(DEEP, init=chosen, seed=3).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in net.state_dict().items())
    assert make_supernet(DEEP, "dinas", SupernetConfig(shift=0.5))[0].init.shift == 0.5
    assert make_supernet(DEEP, "dinas", FORMER)[0].init == "aligned"
    assert make_supernet(DEEP, "spos")[0].init == "he"


@torch.no_grad()
def _common(cfg: SupernetConfig) -> float:
    """Mean correlation of what random paths give to the head, for the same images."""
    net, _ = make_supernet(DEEP, "dinas", cfg)
    sampler, x = FairSampler(net.space, seed=1), torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for path in (sampler.step()[0] for _ in range(4)):
        y = net.stem(x)
        for layer, choice in zip(net.layers, path, strict=True):
            y = layer(y, choice)
        outputs.append((y - y.mean((0, 2, 3), keepdim=True)).flatten())
    pairs = [F.cosine_similarity(a, b, dim=0).item() for i, a in enumerate(outputs) for b in outputs[:i]]
    return sum(pairs) / len(pairs)


def test_paths_of_a_deep_space_have_features_in_common():
    assert abs(_common(FORMER)) < 0.1  # 0.01 for these draws, and 0.47 with the new ones
    assert _common(SupernetConfig()) > 0.35
