"""Zero-cost scores against closed forms, gradients by hand, explicit Jacobians and brute force."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tiny import batches, tiny_space
from torch import nn
from torch.nn import functional as F
from torchvision.models import mobilenet_v2, resnet18

from nasfast.indicators.isometry import largest_singular_value, mean_channel_jacobian, random_signs
from nasfast.indicators.registry import ScoreError, available
from nasfast.indicators.scores import Evidence, score_paths
from nasfast.research.cells.space import nas_bench_201_space
from nasfast.research.zero_cost import (
    ZERO_COST,
    blocks,
    expressivity,
    jacov,
    naswot,
    ntk_q,
    progressivity,
    synflow,
    trainability,
    vkdnw,
)
from nasfast.spaces import nas_bench_macro
from nasfast.supernet import Supernet, build, inherit, untrained

CLASSES = 3


def batch(size=6, *, channels=2, side=4, classes=CLASSES, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, channels, side, side, generator=generator).to(dtype)
    return images, torch.randint(classes, (size,), generator=generator)


class Pointwise(nn.Module):
    """1 x 1 convolution without bias, mean over pixels, linear layer: logits W2 W1 mean(x)."""

    def __init__(self, channels=2, hidden=4, act=None):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.conv = nn.Conv2d(channels, hidden, 1, bias=False)
            self.linear = nn.Linear(hidden, CLASSES, bias=False)
        self.act = act or (lambda x: x)

    def forward(self, x):
        return self.linear(self.act(self.conv(x)).mean((2, 3)))


def gradients_by_hand(network, images, labels):
    """The linear network has dL/dW2 = e^T h / N and dL/dW1 = W2^T e^T m / N, e = softmax - onehot, in numpy's order."""
    m = images.double().mean((2, 3))
    w1, w2 = network.conv.weight.detach().double()[:, :, 0, 0], network.linear.weight.detach().double()
    h = m @ w1.T
    e = torch.softmax(h @ w2.T, 1) - F.one_hot(labels, CLASSES)
    return (e @ w2).T @ m / len(m), e.T @ h / len(m), w1, w2


def test_jacov_by_the_correlation_matrix_of_numpy():
    """Gradients of single images, each by a pass of its own: without norms they do not depend on the batch."""
    network, (images, _) = Pointwise(act=torch.tanh), batch(5)
    rows = []
    for image in images:
        x = image[None].clone().requires_grad_()
        network(x).sum().backward()
        rows.append(x.grad.flatten().double().numpy())
    values = np.linalg.eigvalsh(np.corrcoef(rows)).clip(0)
    expected = -np.sum(np.log(values + 1e-5) + 1 / (values + 1e-5))
    assert jacov(network, images) == pytest.approx(expected, rel=1e-4)


def functional_jacobian(network, images):
    """(N, classes, tensors) by torch.func, which differentiates a copy of the first weight of each tensor."""
    parameters, buffers = dict(network.named_parameters()), dict(network.named_buffers())
    first = {name: p.detach().flatten()[:1] for name, p in parameters.items()}

    def logits(weights, image):
        changed = {n: torch.cat([weights[n], p.detach().flatten()[1:]]).reshape(p.shape) for n, p in parameters.items()}
        return torch.func.functional_call(network, (changed, buffers), (image[None],))[0]

    return torch.stack([torch.cat([*torch.func.jacrev(logits)(first, image).values()], 1) for image in images]).double()


VKDNW = {
    "cells": lambda: untrained(nas_bench_201_space(cells=2, channels=4, resolution=8), (4, 1, 3, 2, 0, 4)),
    "blocks": lambda: untrained(nas_bench_macro(resolution=8), (1, 0, 2, 0, 1, 0, 0, 0)),
}


@pytest.mark.parametrize("name", VKDNW)
def test_vkdnw_by_functional_jacobians(name):
    """The Fisher information is a mean over images of covariances that are written out, and deciles are numpy's."""
    network, (images, _) = VKDNW[name]().eval(), batch(7, channels=3, side=8)
    generator = torch.Generator().manual_seed(0)
    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            drawn = torch.randn(layer.weight.shape, generator=generator)
            layer.weight.data = drawn * (2 / layer.weight[0].numel()) ** 0.5
    jacobian, fisher = functional_jacobian(network, images), 0
    for image, rows in zip(images, jacobian, strict=True):
        p = 0.95 * network(image[None])[0].double().softmax(0) + 0.05 / rows.shape[0]
        fisher = fisher + (rows.T @ (torch.diag(p) - torch.outer(p, p)) @ rows).detach().numpy() / len(images)
    deciles = np.quantile(np.linalg.eigvalsh(fisher).clip(0), np.arange(1, 10) / 10)
    shares = deciles[deciles > 0] / deciles.sum()
    expected = jacobian.shape[2] - np.sum(shares * np.log(shares))
    assert vkdnw(network, images) == pytest.approx(expected, rel=1e-4)


def test_q_of_a_linear_network():
    network, (images, labels) = Pointwise(), batch()
    g1, g2, *_ = gradients_by_hand(network, images, labels)
    assert ntk_q(network, images, labels) == pytest.approx((g1.square().sum() + g2.square().sum()).item(), rel=1e-5)


def test_synflow_of_a_linear_network_is_layers_times_the_flow():
    """Each layer carries the whole flow R = 1^T |W3| |W2| |W1| 1, so the sum is 3 R (conservation, Tanaka et al.)."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Conv2d(2, 3, 1, bias=False),
            nn.BatchNorm2d(3),
            nn.ReLU6(),
            nn.Conv2d(3, 4, 1, bias=False),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, CLASSES, bias=False),
        )
        network[1].running_mean.normal_()  # norms are left out, whatever their parameters are
    w = [network[i].weight.detach().double().abs().flatten(1) for i in (0, 3, 8)]
    flow = (w[2] @ w[1] @ w[0]).sum().item()
    images, _ = batch()
    assert synflow(network, images) == pytest.approx(3 * flow, rel=1e-12)
    # above the cap of ReLU6 too
    with torch.no_grad():
        network[0].weight.mul_(1e6)
    assert synflow(network, images) == pytest.approx(3e6 * flow, rel=1e-6)


@pytest.mark.parametrize("act", [F.relu, nn.ReLU(inplace=True), torch.relu], ids=["functional", "inplace", "torch"])
def test_naswot_of_three_images_by_hand(act):
    """Codes written down: K_ij counts equal bits, and its determinant is expanded by hand."""
    network = Pointwise(channels=4, hidden=4, act=act)
    with torch.no_grad():
        network.conv.weight.copy_(torch.eye(4)[:, :, None, None])
    codes = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 1]]).float()
    images = (2 * codes - 1)[:, :, None, None]
    # equal bits: (0, 1) two, (0, 2) two, (1, 2) two; det [[4,2,2],[2,4,2],[2,2,4]] = 64 + 8 + 8 - 16 - 16 - 16 = 32
    assert naswot(network, images) == pytest.approx(math.log(32), rel=1e-12)


def test_naswot_of_relu6_counts_three_regions():
    network = Pointwise(channels=3, hidden=3, act=nn.ReLU6())
    with torch.no_grad():
        network.conv.weight.copy_(torch.eye(3)[:, :, None, None])
    images = torch.tensor([[7.0, 1, -1], [1, 2, -1]])[:, :, None, None]
    # off, within and above: two of three agree; det [[3, 2], [2, 3]] = 5. A binary code would have found them equal.
    assert naswot(network, images) == pytest.approx(math.log(5), rel=1e-12)


def test_naswot_sums_over_all_units_of_all_relus():
    """Brute force: every pair of images, every unit, on the values that the ReLUs were given."""
    network, seen = build(nas_bench_macro(resolution=8), (1, 2, 0, 1, 0, 1, 2, 0), activation="relu").train(), []
    images, _ = batch(4, channels=3, side=8)
    hooks = [
        m.register_forward_hook(lambda _m, x, _y: seen.append(x[0] > 0))
        for m in network.modules()
        if isinstance(m, nn.ReLU)
    ]
    with torch.no_grad():
        copy.deepcopy(network)(images)
    for hook in hooks:
        hook.remove()
    kernel = torch.tensor(
        [[sum(int((c[i] == c[j]).sum()) for c in seen) for j in range(4)] for i in range(4)], dtype=torch.float64
    )
    assert naswot(network, images) == pytest.approx(torch.logdet(kernel).item(), rel=1e-12)


class Normed(nn.Module):
    """BatchNorm, mean over pixels, linear layer: the maps that enter the last BatchNorm are the images."""

    def __init__(self, channels=2):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm2d(channels), nn.Linear(channels, CLASSES, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x).mean((2, 3)))


NETWORKS = {
    "layer-wise": lambda: build(nas_bench_macro(resolution=16), (1, 2, 0, 1, 0, 1, 2, 0), activation="relu"),
    "path of a supernet": lambda: inherit(Supernet(tiny_space(num_classes=10), layer_indicators=True), (0, -1, 2, 1)),
    "cells": lambda: build(nas_bench_201_space(cells=3, channels=4, resolution=16), (4, 1, 3, 2, 0, 4)),
    "torchvision": lambda: mobilenet_v2(width_mult=0.25, num_classes=10),
}


@pytest.mark.parametrize(
    ("network", "name"), [(list(NETWORKS)[i % len(NETWORKS)], name) for i, name in enumerate(ZERO_COST)]
)
def test_any_module_has_a_score_and_stays_as_it_was(network, name):
    module, (images, labels) = NETWORKS[network](), batch(8, channels=3, side=16, classes=10)
    module.eval()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    first, second = (ZERO_COST[name](module, images, labels) for _ in range(2))
    assert math.isfinite(first)
    assert first == second
    assert not module.training and all(p.grad is None for p in module.parameters())
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())
    assert all(not m._forward_hooks for m in module.modules())


@pytest.mark.parametrize("name", ["synflow", "vkdnw"])
def test_without_a_convolution_that_trains_there_is_no_score(name):
    network, (images, labels) = Pointwise(), batch()
    network.conv.weight.requires_grad_(False)
    with pytest.raises(ScoreError, match="none of the 1 convolutions of this Pointwise has a weight that trains"):
        ZERO_COST[name](network, images, labels)


def test_frozen_weights_are_not_counted():
    network, (images, labels) = Pointwise(), batch()
    g1, *_ = gradients_by_hand(network, images, labels)
    network.linear.weight.requires_grad_(False)
    assert ntk_q(network, images, labels) == pytest.approx(g1.square().sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("score", "network", "images", "message"),
    [
        (naswot, Pointwise(), batch()[0], "no ReLU or ReLU6 ran in this Pointwise"),
        (naswot, Pointwise(act=torch.tanh), batch()[0], "no ReLU or ReLU6 ran in this Pointwise"),
        (naswot, Pointwise(act=F.relu), torch.ones(4, 2, 4, 4), "kernel of 4 images and 64 ReLU units is singular"),
        (jacov, Pointwise(act=torch.zeros_like), batch()[0], "do not depend on the pixels of some image"),
        (jacov, Pointwise(), batch(1)[0], "correlates images, and got 1"),
        (
            vkdnw,
            nn.Sequential(nn.GroupNorm(1, 2), Pointwise()),
            batch()[0],
            "BatchNorms, not GroupNorm",
        ),
        (
            vkdnw,
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), Pointwise()),
            batch()[0],
            "convolutions that pad with zeros, not padding_mode='reflect'",
        ),
    ],
)
def test_what_has_no_score_says_why(score, network, images, message):
    with pytest.raises(ScoreError, match=message):
        score(network, images, torch.zeros(len(images), dtype=torch.long))


@pytest.mark.parametrize("name", ["synflow", "ntk_q", "jacov"])
def test_what_is_not_finite_names_the_layer(name):
    images, labels = batch()
    network = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
    )
    with torch.no_grad():
        network[1].weight[0, 0] = float("inf")
    with pytest.raises(ScoreError, match="this Sequential has no finite score: the (weight|output) of layer '1'"):
        ZERO_COST[name](network, images, labels)


def test_fused_norms_cannot_be_left_out():
    images, labels = batch(4, channels=3, side=16)
    net = Supernet(tiny_space(), fused=True)
    net.freeze("all")

    class Path(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x, (0, 1, 2, 0))

    with pytest.raises(ScoreError, match="norms of this Path run inside fused operators"):
        synflow(Path(), images, labels)
    with pytest.raises(ScoreError, match="built with fused=True must be built without"):
        naswot(Path(), images, labels)


@pytest.mark.parametrize("name", ["jacov", "trainability"])
def test_paths_of_a_supernet_are_scored_by_name(name):
    """A frozen supernet's path counts all its weights; the first batch of the evidence is the one that is used."""
    net, images = Supernet(tiny_space(), layer_indicators=False, seed=3), batches(2)
    net.freeze()
    path = (0, 2, 1, 1)
    found = score_paths(name, Evidence(net, images), [path])
    assert found == {path: ZERO_COST[name](inherit(net, path), *images[0])}


def test_a_path_without_a_score_is_named():
    net = Supernet(tiny_space(), layer_indicators=False)
    with torch.no_grad():
        net.layers[1].candidates[2].block_indicator.weight.fill_(float("nan"))
    evidence = Evidence(net, batches(1))
    assert math.isfinite(score_paths("ntk_q", evidence, [(0, 1, 0, 0)])[0, 1, 0, 0])
    with pytest.raises(ScoreError, match=r"path 0 2 0 0 of tiny has no ntk_q: .* of layer 'blocks.1.project.bn'"):
        score_paths("ntk_q", evidence, [(0, 2, 0, 0)])


def test_a_supernet_without_relu_has_no_naswot():
    net = Supernet(tiny_space(activation="tanh"), layer_indicators=False)
    assert {"jacov", "synflow"} < set(available(net)) and "naswot" not in available(net)
    of_a_stage = tiny_space(stages=(tiny_space().stages[0].replace(activation="hswish"),))
    assert "naswot" not in available(Supernet(of_a_stage, layer_indicators=False))
    with pytest.raises(ScoreError, match="no score 'naswot': .*the activation is tanh. It can have .*synflow"):
        score_paths("naswot", Evidence(net, batches(1)), [(0, 0, 0, 0)])


# --- scores of blocks (AZ-NAS)

EVERY = (expressivity, progressivity, trainability)


def normal(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def pointwise(*weights: torch.Tensor) -> nn.Sequential:
    """1 x 1 convolutions without bias, one block each."""
    convs = [nn.Conv2d(w.shape[1], w.shape[0], 1, bias=False) for w in weights]
    for conv, weight in zip(convs, weights, strict=True):
        conv.weight.data = weight[:, :, None, None].clone()
    return nn.Sequential(*(nn.Sequential(conv) for conv in convs))


class Network(nn.Module):
    """Blocks of convolution, norm and activation, each a module."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.features = nn.ModuleList(parts)
        self.classifier = nn.LazyLinear(3)

    def forward(self, x):
        for part in self.features:
            x = part(x)
        return self.classifier(x.mean((2, 3)))


class Part(nn.Module):
    def __init__(self, inputs, outputs, *, stride=1, norm=True, inplace=False, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1)
        # before the convolution, where an activation in place would change the output of the block before
        self.act = nn.ReLU(inplace=inplace)
        self.norm = nn.BatchNorm2d(outputs) if norm else nn.Identity()

    def forward(self, x):
        return self.norm(self.conv(self.act(x)))


def network(**changes) -> Network:
    parts = Part(2, 4, seed=1, **changes), Part(4, 4, seed=2, **changes), Part(4, 6, stride=2, seed=3, **changes)
    net = Network(*parts)
    net(normal(4, 2, 6, 6))  # its lazy classifier gets its size
    return net


def test_trainability_of_scales_and_of_one_channel():
    """With one channel, M is the weight itself: s = |w|."""
    one = torch.ones(1, 1)
    net = pointwise(one, 3 * one, -0.5 * one)
    assert trainability(net, normal(2, 1, 4, 4)) == pytest.approx(((2 - 3 - 1 / 3) + (2 - 0.5 - 2)) / 2, rel=1e-5)
    assert trainability(pointwise(one, -one, -one), normal(2, 1, 4, 4)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("side", [6, 5])
def test_trainability_is_that_of_each_block_by_itself(side):
    net, x = network().double(), normal(3, 2, side, side, dtype=torch.float64)
    generator, terms = torch.Generator().manual_seed(4), []
    before = net.features[0](x)
    for part in net.features[1:]:
        leaf = before.detach().requires_grad_()
        before = part(leaf)
        s = largest_singular_value(mean_channel_jacobian(leaf, before, random_signs(before, generator)))
        terms.append(2 - s - 1 / s)
    assert trainability(net, x, seed=4) == pytest.approx(sum(terms) / 2, rel=1e-9)


def test_entropies_of_principal_components():
    """Two independent channels of variances a and b have the entropy of the shares a and b."""
    net = pointwise(torch.eye(2), torch.diag(torch.tensor([3.0, 1.0])), torch.eye(2))
    x = normal(500, 2, 4, 4)
    x = (x - x.mean((0, 2, 3), keepdim=True)).transpose(0, 1).flatten(1).double()
    x = (torch.linalg.inv(torch.linalg.cholesky(x @ x.T / x.shape[1])) @ x).view(2, 500, 4, 4).transpose(0, 1).float()
    even, uneven = math.log(2), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert expressivity(net, x) == pytest.approx(even + 2 * uneven, rel=1e-4)
    assert progressivity(net, x) == pytest.approx(uneven - even, rel=1e-4)


def test_blocks_of_known_networks():
    names = ["conv1", *(f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1))]
    assert list(blocks(resnet18())) == names
    assert list(blocks(mobilenet_v2())) == [f"features.{i}" for i in range(19)]
    assert list(blocks(build(tiny_space(), (1, 0, 2, 1)))) == ["stem.0", *(f"blocks.{i}" for i in range(4)), "head.0"]
    assert list(blocks(nn.Sequential(network()))) == [f"0.features.{i}" for i in range(3)]


def test_every_cell_is_a_block_and_so_is_every_reduction():
    space = nas_bench_201_space(cells=2, channels=4)
    names = ["stem.0", "cells.0", "cells.1", "transitions.1"]
    for op in ("conv_3x3", "avg_pool_3x3"):
        net = untrained(space, (space.ops.index(op),) * 6)
        assert sorted(blocks(net)) == sorted(names)
        assert all(math.isfinite(score(net, normal(4, 3, 8, 8))) for score in EVERY)


def test_activations_in_place_and_networks_without_norms_have_scores():
    x = normal(4, 2, 6, 6)
    for norm in (True, False):
        net, plain = (network(norm=norm, inplace=inplace) for inplace in (True, False))
        assert [s(net, x) for s in EVERY] == pytest.approx([s(plain, x) for s in EVERY], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single_precision(dtype):
    net, x = network(), normal(4, 2, 6, 6).to(dtype)
    half = network().to(dtype)
    net.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    assert [s(half, x) for s in EVERY] == [s(net, x.float()) for s in EVERY]


class Constant(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.conv(torch.ones_like(x))


class Several(Part):
    """A block with outputs beside its maps."""

    def forward(self, x):
        return super().forward(x), {"more": x}


class First(Part):
    def forward(self, x):
        return super().forward(x[0])


def test_a_tuple_counts_by_its_first_map():
    x = normal(4, 2, 6, 6)
    plain = nn.Sequential(Part(2, 4, seed=1), Part(4, 4, seed=2))
    several = nn.Sequential(Several(2, 4, seed=1), First(4, 4, seed=2))
    assert [s(several, x) for s in EVERY] == [s(plain, x) for s in EVERY]


class Unchanged(Constant):
    def forward(self, x):
        return x


def infinite() -> nn.Sequential:
    net = nn.Sequential(Part(2, 4), Part(4, 4))
    net[1].conv.weight.data[0] = math.inf
    return net


@pytest.mark.parametrize(
    ("net", "scores", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), EVERY, "has 0 blocks, and the score compares at least two"),
        (nn.Sequential(Part(2, 4)), EVERY, "has 1 blocks, and the score compares at least two"),
        (nn.Sequential(Part(2, 4), Constant()), [trainability], "block '1': the output of a block does not depend"),
        (nn.Sequential(Part(2, 4), Constant()), [expressivity], "block '1' has the same output at all pixels"),
        (nn.Sequential(Part(2, 4), Unchanged()), [trainability], "block '1' passes its input on unchanged"),
        (infinite(), EVERY, "has no finite score: block '1' gives no finite map"),
    ],
)
def test_networks_without_a_score(net, scores, message):
    for score in scores:
        with pytest.raises(ScoreError, match=message):
            score(net, normal(2, 2, 4, 4))
