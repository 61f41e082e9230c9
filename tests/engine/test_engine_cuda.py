"""The graph engine on the CUDA kernels of chains: on a GPU whose kernels are built, else in their emulation."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from devices import DEVICE
from engines import capture, compare, gradients, networks
from kernel_cases.cuda import ON_GPU, needs_kernels
from tiny import CHOICES, tiny_space
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.captures import reduced_by_launches
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.engine.segments import ChainSegment, Classifier
from nasfast.measure.timing import random_batch
from nasfast.ops import backends
from nasfast.ops.chain.plan import Kind, read_plan
from nasfast.ops.tensors import storage_dtype
from nasfast.spaces import Block, FixedLayer, Stage

pytestmark = needs_kernels
emulates = pytest.mark.skipif(DEVICE == "cuda", reason="replays of CUDA graphs run no Python, in which this test looks")


@pytest.fixture
def emulated(monkeypatch):
    """Chains that the CUDA kernels have go there, on a GPU or in the emulation."""
    if DEVICE == "cuda" and not ON_GPU:
        pytest.skip("the CUDA kernels are not built for this GPU")
    for op in ("conv_bn_act", "conv_bn_act_chain") if not ON_GPU else ():
        (cuda,) = (backend for backend in backends._TABLE[op] if backend.name == "cuda")
        served = replace(
            cuda, why_not=lambda x: "" if storage_dtype(x) == torch.bfloat16 else "its type", automatic=None
        )
        monkeypatch.setitem(backends._TABLE, op, (served, *backends._TABLE[op]))
    yield


class Copies(TorchDispatchMode):
    """Counts the operators that copy numbers or add gradients up."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.found[name] += name in ("copy_", "_foreach_copy_", "clone", "add", "add_", "cat")
        return func(*args, **(kwargs or {}))


@emulates
def test_chains_write_into_boundaries_and_gradients(emulated):
    space = tiny_space(resolution=8, stages=(Stage(16, 1, 2, (Block("mbconv", 3, 2),)),) * 2)
    with reduced_by_launches():
        graphs = compare(space, "bn", [[(0, 0)]], batch=2, bf16=True, layer_indicators=False)
    with Copies() as copies:
        graphs.forward_backward(*random_batch(space, 2, device=DEVICE), [(0, 0)])
    segments = [segment for choices in graphs._segments for segment in choices.values()]
    assert [type(part) for segment in segments for part in reversed(segment.parts)] == [*[ChainSegment] * 4, Classifier]
    # images and labels; the gradients of the classifier; the loss, which is smoothed, and its backward
    assert {name: count for name, count in copies.found.items() if count} == {
        "copy_": 2,
        "_foreach_copy_": 1,
        "add": 2,
    }


@pytest.mark.parametrize("layer_indicators", [False, True])
def test_a_candidate_makes_what_the_layer_before_has_deferred(layer_indicators, emulated):
    """A reduction defers a result to which nothing is added, a normal block one with its input, an identity none."""
    blocks = Block("mbconv", 3, 2), Block("mbconv", 3, 1), Block("identity")
    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, blocks),))
    # in the last step a candidate gets its input in two ways, and its gradients add up in the order of the paths
    steps = [[(0, 0, 0)], [(1, 2, 1), (2, 1, 2)], [(0, 0, 0), (0, 2, 0), (0, 1, 0)]]
    with reduced_by_launches():
        graphs = compare(space, "bn", steps, batch=2, bf16=True, layer_indicators=layer_indicators)
    # by choice, and how it gets its input: it is there, it is made, something is added to make it
    stem, first, second, third, head, _ = graphs._segments
    assert set(stem) == {(None, "written")} and set(first) == {(0, "written"), (1, "written"), (2, "written")}
    assert set(second) == {(0, "deferred"), (1, "deferred"), (2, "deferred"), (1, "written")}
    assert set(third) == {(0, "deferred sum"), (1, "written"), (2, "deferred sum"), (0, "written")}
    assert set(head) == {(None, "deferred sum"), (None, "written")}
    assert first[0, "written"].result.added is None and second[0, "deferred"].result.added is graphs._boundaries[2].x
    # an identity reads its input by no chain, so a launch of its own makes it
    assert isinstance(second[0, "deferred"], ChainSegment) and not isinstance(second[2, "deferred"], ChainSegment)


class Reductions(TorchDispatchMode):
    """Counts the launches that begin the backward of a deferred BatchNorm."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.nasfast.conv_bn_act_chain_gpu_reduce
        return func(*args, **(kwargs or {}))


@emulates
def test_a_candidate_begins_the_backward_of_the_layer_before(emulated):
    """So does the head, which is one chain. Its sums have another order than in the eager engine."""
    blocks = Block("mbconv", 3, 2), Block("mbconv", 3, 1), Block("identity")
    head = FixedLayer(Block("mbconv", 3, 3), 24), FixedLayer(Block("conv", 1), 32)
    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, blocks),), head=head)
    eager_net, net = networks(space, "bn", layer_indicators=False)
    images, labels = random_batch(space, 2, device=DEVICE)
    eager = EagerEngine(eager_net, 0.1, bf16=True)
    graphs = GraphEngine(net, tuple(images.shape), 0.1, True, capture())
    # the second time, what an earlier step has deferred is NaN
    for paths, launches in [([(0, 0, 1)], 0), ([(0, 2, 1), (2, 1, 2)], 2)] * 2:
        want = eager.forward_backward(images, labels, paths)
        graphs.forward_backward(images, labels, paths)
        for buffer in graphs.buffers():
            buffer.fill_(torch.nan)
        with Reductions() as reductions:
            got = graphs.forward_backward(images, labels, paths)
        assert torch.equal(want.loss, got.loss) and reductions.count == launches
        expected, computed = gradients(eager_net), gradients(net)
        assert expected.keys() == computed.keys()
        size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
        for name, gradient in computed.items():
            assert float((gradient - expected[name]).norm()) <= 2**-9 * size, name
    assert {len(segment.head.chain.plan.stages) for segment in graphs._segments[4].values()} == {4}


@emulates
def test_a_candidate_with_a_hook_is_no_chain(emulated):
    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, (Block("mbconv", 3, 2), Block("mbconv", 3, 1))),))

    seen = []

    def hooked(*arguments, **options):
        nets = networks(*arguments, **options)
        for net in nets:
            net.layers[1].candidates[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].isnan()))
            net.layers[1].candidates[0].register_forward_hook(lambda module, inputs, y: seen.append(y.isnan()))
        return nets

    with reduced_by_launches():
        graphs = compare(space, "bn", [[(0, 0, 0)]] * 2, batch=2, bf16=True, make=hooked, layer_indicators=False)
    # what the hooks read in the second step, of both engines; before, buffers are not filled
    assert not any(nans.any() for nans in seen[-4:])
    assert graphs._segments[1][0, "written"].result is not None
    assert not isinstance(graphs._segments[2][0, "deferred"], ChainSegment)


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def _parametrise(block):
    parametrize.register_parametrization(block.depthwise.bn, "weight", Doubled())


def _parametrise_frozen(block):
    parametrize.register_parametrization(block.project.conv, "weight", Doubled())


def _hook_parameter(block):
    block.depthwise.bn.weight.register_hook(lambda grad: 3 * grad)


def _hook_backward(block):
    block.register_full_backward_hook(lambda module, dx, dy: (3 * dx[0],))


def _tie(block):
    block.depthwise.bn.bias = block.depthwise.bn.weight


def _have_unused(block):
    block.register_parameter("unused", torch.nn.Parameter(torch.ones(3, device=DEVICE)))


def _replace_forward(block):
    forward = block.forward
    block.forward = lambda x: 2 * forward(x)


@emulates
@pytest.mark.parametrize(
    "change", [_parametrise, _parametrise_frozen, _hook_parameter, _hook_backward, _tie, _have_unused, _replace_forward]
)
def test_a_candidate_that_is_more_than_a_chain_is_called(change, emulated):
    def changed(*arguments, **options):
        nets = networks(*arguments, **options)
        for net in nets:
            change(net.layers[1].candidates[0])
        return nets

    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, (Block("mbconv", 3, 2), Block("mbconv", 3, 1))),))
    with reduced_by_launches():
        graphs = compare(space, "bn", [[(0, 0, 0)]] * 2, batch=2, bf16=True, make=changed, layer_indicators=False)
    assert isinstance(graphs._segments[1][0, "written"], ChainSegment)
    assert not isinstance(graphs._segments[2][0, "deferred"], ChainSegment)


@emulates
def test_frozen_weights_may_lie_anywhere(emulated):
    """Kernels read 16 bytes at a time."""

    def moved(*arguments, **options):
        nets = networks(*arguments, **options)
        for net in nets:
            for module in net.layers[1].candidates[0].modules():
                if isinstance(module, torch.nn.Conv2d):
                    weight = module.weight
                    flat = torch.empty(weight.numel() + 1, device=DEVICE)[1:]
                    weight.data = flat.view(weight.shape).copy_(weight)
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.weight = torch.nn.Parameter(torch.ones(1).expand(module.num_features), requires_grad=False)
        return nets

    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, (Block("mbconv", 3, 2), Block("mbconv", 3, 1))),))
    with reduced_by_launches():
        graphs = compare(space, "bn", [[(0, 0, 0)]], batch=2, bf16=True, make=moved, layer_indicators=False)
    assert isinstance(graphs._segments[2][0, "deferred"], ChainSegment)


@pytest.mark.parametrize("name", ["classifier", "layers.0.candidates.0.expand.conv"])
def test_frozen_weights_are_rounded_again_when_they_have_changed(emulated, name):
    space = tiny_space(resolution=8)
    eager_net, net = networks(space, "indicators")
    images, labels = random_batch(space, 2, device=DEVICE)
    engines = EagerEngine(eager_net, bf16=True), GraphEngine(net, tuple(images.shape), bf16=True, capture=capture())
    losses = []
    for flip in (1.0, -1.0):
        for one in (eager_net, net):
            with torch.no_grad():
                one.get_submodule(name).weight.mul_(flip)
        want, got = (engine.forward_backward(images, labels, [(0, 1, 0, 1)]).loss for engine in engines)
        assert torch.equal(want, got)
        losses.append(got)
    assert losses[0] != losses[1]


@emulates
def test_pointwise_kernels_read_frozen_weights_in_16_bits(emulated, monkeypatch):
    """They are at the same place at every step, because graphs have their addresses."""
    read, forward = [], torch.ops.nasfast.conv_bn_act_chain_gpu_fwd

    def reading(**arguments):
        stages = read_plan(arguments["plan"]).stages
        read.extend(zip(stages, [(w.dtype, w.data_ptr()) for w in arguments["conv_weights"]], strict=True))
        return forward(**arguments)

    monkeypatch.setattr(torch.ops.nasfast, "conv_bn_act_chain_gpu_fwd", reading)
    # the kernels run every chain as a whole, in multiples of 8 channels; other chains are not static
    space = tiny_space(resolution=8, stages=(Stage(8, 2, 2, CHOICES), Stage(16, 2, 1, CHOICES)))
    _, net = networks(space, "bn")
    images, labels = random_batch(space, 2, device=DEVICE)
    engine = GraphEngine(net, tuple(images.shape), bf16=True, capture=capture())
    steps = []
    for _ in range(2):
        read.clear()
        engine.forward_backward(images, labels, [(0, 1, 0, 1)])
        steps.append(set(read))
    assert steps[0] == steps[1]
    for stage, (dtype, _) in steps[0]:
        assert dtype == (torch.bfloat16 if stage.kind == Kind.POINTWISE else torch.float32)
    assert {dtype for _, (dtype, _) in steps[0]} == {torch.bfloat16, torch.float32}
