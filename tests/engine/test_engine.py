"""The graph engine against the eager one. Without a GPU, captures replay eagerly over the same static buffers."""

import logging

import pytest
import torch
from devices import DEVICE
from engines import capture, compare, gradients, networks
from tiny import tiny_macro_space, tiny_space

from benchmarks.captures import EagerCapture
from nasfast import spaces
from nasfast.engine import EagerEngine, GraphEngine, make_engine
from nasfast.engine.graphs import EngineError
from nasfast.measure.timing import random_batch
from nasfast.ops import _native
from nasfast.ops.modules import BNAct2d
from nasfast.spaces import Block, Stage

pytestmark = pytest.mark.usefixtures("device")


def shuffle_space() -> spaces.SearchSpace:
    """Two reductions and four normal layers with the choices of the ShuffleNetV2 space."""
    full = spaces.shufflenet_v2(resolution=32, num_classes=5)
    stages = tuple(Stage(c, 3, 2, full.stages[0].choices) for c in (24, 40))
    return full.replace(name="small_shuffle", stages=stages, head=())


# every kind of block of the package; neither width nor the number of layers changes what the engines do with one
SPACES = {"digits_mini": spaces.digits_mini, "macro": tiny_macro_space, "shuffle": shuffle_space}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize("trainable", ["indicators", "bn", "all"])
@pytest.mark.parametrize("name", SPACES)
def test_steps_are_those_of_the_eager_engine_bit_for_bit(name, trainable):
    if name == "shuffle" and DEVICE == "cpu" and _native.extension is None:
        pytest.skip("PyTorch's BatchNorm adds up in the order of strides, and the engine's gradients have their own")
    space = SPACES[name]()
    sampler = spaces.UniformSampler(space, seed=1)
    compare(space, trainable, [sampler.step() for _ in range(4)], layer_indicators=False)


@pytest.mark.parametrize("trainable", ["indicators", "bn"])
@pytest.mark.parametrize("sampler", [spaces.FairSampler, spaces.StrictFairSampler])
def test_gradients_of_several_paths_and_layer_indicators_add_up(sampler, trainable):
    """If all BatchNorms train, those of stem and head are on every path."""
    space = tiny_macro_space()
    fair = sampler(space, seed=1, layer_indicators=True)
    compare(space, trainable, [fair.step() for _ in range(3)], layer_indicators=True)


class Constant(torch.nn.Module):
    """Has a parameter, and a result that depends on nothing."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.full_like(x, 0.5)


class Shared(torch.nn.Module):
    """A BatchNorm that several candidates share."""

    def __init__(self, bn):
        super().__init__()
        self.bn = bn

    def forward(self, x):
        return self.bn(x) + x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constant", "shared"])
def test_candidates_of_other_kinds(kind):
    """One that cuts the gradient off, and two with one parameter."""
    space = spaces.digits_mini()
    normal = [i for i, layer in enumerate(space.layers) if layer.normal]

    def changed(*arguments, **options):
        nets = networks(*arguments, **options)
        channels = space.layers[normal[0]].in_channels
        for net in nets:
            if kind == "shared":
                bn = BNAct2d(channels, act="relu6")
                modules = [Shared(bn), Shared(bn)]
            else:
                modules = [Constant()]
            for i, other in zip(normal, modules, strict=False):
                net.layers[i].candidates[0] = other.to(DEVICE).train()
        return nets

    first = tuple(0 for _ in space.layers)
    second = tuple(int(i in normal) for i in range(len(space.layers)))
    compare(space, "bn", [[first], [second, first], [second]], make=changed, layer_indicators=False)


def test_autocast():
    space = tiny_macro_space()
    compare(space, "bn", [[(0, 1, 2, 0)], [(2,) * 4]], bf16=True, layer_indicators=True)


def test_autocast_without_a_stem_leaves_the_images_as_they_are():
    """A residual of the first block adds the images themselves."""
    blocks = Block("mbconv", 3, 2), Block("mbconv", 5, 1)
    space = tiny_space(resolution=8, stem=(), stages=(Stage(3, 2, 1, blocks), Stage(12, 2, 1, blocks)))
    compare(space, "bn", [[(0, 1, 0, 1)], [(1, 0, 1, 0)]], bf16=True, layer_indicators=False)


def test_gradients_of_parameters_outside_the_path_are_none_after_an_eager_step_too():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    images, labels = random_batch(space, 4, device=DEVICE)
    engine = GraphEngine(net, tuple(images.shape), capture=capture())
    paths = [tuple(choice for _ in space.layers) for choice in range(3)]
    for x, y, path in ((images, labels, paths[0]), (images[:3], labels[:3], paths[1]), (images, labels, paths[2])):
        engine.forward_backward(x, y, [path])
        trained = set(gradients(net))
        EagerEngine(net).forward_backward(x, y, [path])
        assert trained == set(gradients(net))


def test_candidates_are_captured_once_and_only_when_needed_which_is_announced(caplog):
    space = spaces.digits_mini()
    path = tuple(0 for _ in space.layers)
    with caplog.at_level(logging.INFO, logger="nasfast.engine"):
        graphs = compare(space, "bn", [[path]] * 3, layer_indicators=False)
    number = sum(len(layer.legal) for layer in space.layers) + 2  # the stem; head and classifier
    assert [r.message for r in caplog.records if "captures" in r.message] == [
        f"CUDA graphs: the first step of each candidate captures its graphs ({number} in all), and waits"
    ]
    # the classifier is in the graph of the head
    assert [len(segments) for segments in graphs._segments] == [*[1] * (len(graphs._layers) - 1), 0]
    segment = graphs._segments[1][0, "written"]
    graphs.forward_backward(*random_batch(space, 4, device=DEVICE), [path])
    assert graphs._segments[1][0, "written"] is segment


def test_a_smaller_last_batch_runs_eagerly():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    engine = GraphEngine(net, (4, space.in_channels, space.resolution, space.resolution), capture=capture())
    images, labels = random_batch(space, 3, device=DEVICE)
    path = tuple(0 for _ in space.layers)
    result = engine.forward_backward(images, labels, [path])
    assert torch.equal(result.loss, EagerEngine(net).forward_backward(images, labels, [path]).loss)


@pytest.mark.skipif(DEVICE == "cuda", reason="has CUDA graphs")
def test_without_cuda_graphs_are_refused_and_auto_is_eager(caplog):
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    shape = (4, space.in_channels, space.resolution, space.resolution)
    with pytest.raises(EngineError, match="need the network on a CUDA device, it is on cpu"):
        make_engine(net, "graphs", batch=shape, label_smoothing=0.0, bf16=False)
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        assert isinstance(make_engine(net, "auto", batch=shape, label_smoothing=0.0, bf16=False), EagerEngine)
    assert not caplog.records


def test_graphs_of_another_network_are_refused():
    with pytest.raises(EngineError, match="captured per candidate of a Supernet, got Linear"):
        make_engine(torch.nn.Linear(2, 2), "graphs", batch=(1, 2), label_smoothing=0.0, bf16=False)


def test_a_candidate_whose_shape_is_not_known_before_is_named():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    net.layers[1].candidates[2].register_forward_hook(lambda module, inputs, y: y * y.sum().item())
    shape = (4, space.in_channels, space.resolution, space.resolution)
    with pytest.raises(EngineError, match=r"layer 1 choice 2 \(.*\) does not run on fake tensors"):
        GraphEngine(net, shape, capture=EagerCapture())


class FailingCapture(EagerCapture):
    """Cannot capture from the third segment on."""

    def __init__(self):
        self.count = 0

    def capture(self, functions, pool):
        self.count += 1
        if self.count > 2:
            raise RuntimeError("out of something")
        return super().capture(functions, pool)


def test_a_candidate_that_cannot_be_captured_is_named():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    images, labels = random_batch(space, 4, device=DEVICE)
    path = tuple(0 for _ in space.layers)
    strict = GraphEngine(net, tuple(images.shape), capture=FailingCapture())
    with pytest.raises(EngineError, match=r"layer 1 choice 0 \(.*\) could not be captured: out of something"):
        strict.forward_backward(images, labels, [path])
