"""What a step of the graph engine does outside of its graphs, counted with graphs that do nothing."""

from collections import Counter

import pytest
import torch
from tiny import tiny_space
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.captures import EagerCapture
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.measure.timing import random_batch
from nasfast.spaces import ArchError
from nasfast.supernet import Supernet
from nasfast.train.loop import update


class Stub:
    """A capture that runs the functions once; replays only count, and so take what the host takes for a real one."""

    def __init__(self):
        self.replays = 0

    def pool(self):
        return None

    def capture(self, functions, pool):
        for function in functions:
            function()
        return [self.replay for _ in functions]

    def replay(self):
        self.replays += 1


class Operators(TorchDispatchMode):
    """Counts the operators that read or write elements: on a GPU, each launches one kernel or more."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, result))) and not func.is_view:
            self.count[func._opname] += 1
        return result


def stepped(paths: int, *, clip_norm: float = 5.0) -> tuple[Stub, Operators, Operators, int]:
    """The replays and operators of a step of so many paths, those of the update behind it, and the layers and stem."""
    space = tiny_space()
    net = Supernet(space, layer_indicators=False)
    net.freeze("bn")
    images, labels = random_batch(space, 2)
    engine = GraphEngine(net.train(), tuple(images.shape), capture=(stub := Stub()))
    chosen = [(0, 1, 0, 1), (1, 1, 0, 2)][:paths]
    engine.forward_backward(images, labels, chosen)
    stub.replays = 0
    with Operators() as step:
        engine.forward_backward(images, labels, chosen)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9, fused=True)
    update(optimizer, clip_norm)  # the first one makes the momentum
    with Operators() as updated:
        update(optimizer, clip_norm)
    return stub, step, updated, len(chosen[0]) + 1


def test_a_step_replays_two_graphs_per_layer_and_copies_its_batch_and_outcome():
    """43 replays for the 20 layers of mobilenet_v2 and its stem; head and classifier are in one graph."""
    stub, step, _, layers = stepped(1)
    assert stub.replays == 2 * layers + 1
    assert step.count == {"copy_": 2, "stack": 1}


def test_the_device_has_work_before_python_looks_at_the_paths():
    """A path that the space does not have is refused behind the first replay, and changes no gradient."""
    space = tiny_space()
    net = Supernet(space, layer_indicators=False).train()
    images, labels = random_batch(space, 2)
    engine = GraphEngine(net, tuple(images.shape), capture=(stub := Stub()))
    engine.forward_backward(images, labels, [(0, 1, 0, 1)])
    before = {p: p.grad for p in net.parameters()}
    stub.replays = 0
    with Operators() as step, pytest.raises(ArchError):
        engine.forward_backward(images, labels, [(9, 9, 9, 9)])
    assert stub.replays == 1 and step.count == {"copy_": 1}
    assert all(p.grad is before[p] for p in net.parameters())


def test_a_second_path_adds_its_replays_and_the_sums_of_shared_gradients():
    stub, step, _, layers = stepped(2)
    assert stub.replays == 2 * (2 * layers + 1)
    # the gradients of stem, layers 1 and 2, head and classifier are added; two losses and two counts are reduced
    assert step.count == {"copy_": 2, "clone": 5, "add_": 5, "stack": 2 + 2, "mean": 1, "sum": 1}


@pytest.mark.parametrize("clip_norm", [0.0, 5.0])
def test_the_update_has_no_launches_per_parameter_and_scales_only_to_clip(clip_norm):
    *_, updated, _ = stepped(1, clip_norm=clip_norm)
    once = ["_foreach_norm", "stack", "linalg_vector_norm", "_fused_sgd_"]
    once += ["add", "reciprocal", "mul", "clamp", "_foreach_mul_"] if clip_norm else []
    assert updated.count == dict.fromkeys(once, 1)


@pytest.mark.parametrize("engine", ["eager", "graphs"])
def test_gradients_and_momentum_have_the_strides_of_their_parameters(engine):
    """Which fused SGD on a GPU demands; where every weight trains, those of convolutions are channels_last."""
    space = tiny_space()
    net = Supernet(space)
    net.freeze("all")
    net.to(memory_format=torch.channels_last).train()
    images, labels = random_batch(space, 2)
    graphs = GraphEngine(net, tuple(images.shape), capture=EagerCapture())
    step = graphs if engine == "graphs" else EagerEngine(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    for _ in range(2):
        step.forward_backward(images, labels, [(0, 1, 0, 1)])
        update(optimizer, 5.0)
    graded = [p for p in net.parameters() if p.grad is not None]
    assert any(p.ndim == 4 and p.grad.stride(1) == 1 for p in graded)
    for p in graded:
        assert p.grad.stride() == p.stride() == optimizer.state[p]["momentum_buffer"].stride()
