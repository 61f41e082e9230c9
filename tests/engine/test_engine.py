"""The graph engine against the eager one. Without a GPU, captures replay eagerly over the same static buffers."""

import logging
from collections import Counter
from dataclasses import replace

import pytest
import torch
from devices import DEVICE
from tiny import tiny_macro_space, tiny_space
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.captures import EagerCapture
from nasfast import spaces, use_backend
from nasfast.engine import EagerEngine, GraphEngine, make_engine
from nasfast.engine.graphs import EngineError
from nasfast.measure.timing import random_batch
from nasfast.ops import _native, _triton, backends, bn_act, conv_bn_act_chain, modules
from nasfast.ops.cuda_reasons import Unjoined
from nasfast.ops.destinations import Offer
from nasfast.ops.modules import BNAct2d
from nasfast.ops.plan import Kind, read_plan, storage_dtype
from nasfast.spaces import Block, FixedLayer, Stage
from nasfast.supernet import Supernet

pytestmark = pytest.mark.usefixtures("device")
CAPTURE = None if DEVICE == "cuda" else EagerCapture


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


def capture():
    return None if CAPTURE is None else CAPTURE()


def networks(space, trainable, **options):
    """The same supernet twice."""
    nets = [Supernet(space, seed=3, **options) for _ in range(2)]
    for net in nets:
        net.freeze(trainable, classifier=trainable != "indicators")
        net.to(device=DEVICE, memory_format=torch.channels_last).train()
    return nets


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def compare(space, trainable, steps, *, bf16=False, batch=4, make=networks, **options):
    eager_net, net = make(space, trainable, **options)
    images, labels = random_batch(space, batch, device=DEVICE)
    eager = EagerEngine(eager_net, 0.1, bf16)
    graphs = GraphEngine(net, tuple(images.shape), 0.1, bf16, capture())
    optimizers = [torch.optim.SGD([p for p in n.parameters() if p.requires_grad], 0.5, 0.9) for n in (eager_net, net)]
    for i, paths in enumerate(steps):
        x = images + i
        want, got = (engine.forward_backward(x, labels, paths) for engine in (eager, graphs))
        assert torch.equal(want.loss, got.loss) and torch.equal(want.correct, got.correct), (i, want, got)
        expected, found = gradients(eager_net), gradients(net)
        assert expected.keys() == found.keys()
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), (i, name)
        for optimizer in optimizers:
            optimizer.step()
        for buffer in graphs.buffers():
            buffer.fill_(torch.nan)
    return graphs


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


class Twice(torch.nn.Module):
    """Two Triton operators, of which the second keeps the result of the first."""

    def __init__(self, channels):
        super().__init__()
        self.bns = torch.nn.ModuleList(BNAct2d(channels) for _ in range(2))

    def forward(self, x):
        for bn in self.bns:
            x = bn_act(x, bn.weight, bn.bias, backend="triton")
        return x


class Shared(torch.nn.Module):
    """A BatchNorm that several candidates share."""

    def __init__(self, bn):
        super().__init__()
        self.bn = bn

    def forward(self, x):
        return self.bn(x) + x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constant", "twice", "shared"])
def test_candidates_of_other_kinds(kind):
    """One that cuts the gradient off, one whose first operator finds the boundary fitting, two with one parameter."""
    if kind == "twice" and _triton.why_missing() is not None:
        pytest.skip(_triton.why_missing())
    space = spaces.digits_mini()
    normal = [i for i, layer in enumerate(space.layers) if layer.normal]

    def changed(*arguments, **options):
        nets = networks(*arguments, **options)
        channels = space.layers[normal[0]].in_channels
        for net in nets:
            if kind == "shared":
                bn = BNAct2d(channels, act="relu6")
                others = [Shared(bn), Shared(bn)]
            else:
                others = [Twice(channels) if kind == "twice" else Constant()]
            for i, other in zip(normal, others, strict=False):
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


class Copies(TorchDispatchMode):
    """Counts the operators that move numbers without computing any, or add gradients up."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (
            torch.ops.aten.copy_,
            torch.ops.aten._foreach_copy_,
            torch.ops.aten.clone,
            torch.ops.aten.zero_,
            torch.ops.aten.fill_,
            torch.ops.aten.add,
            torch.ops.aten.add_,
            torch.ops.aten.cat,
        ):
            self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.interpreter
@pytest.mark.skipif(_triton.why_missing() is not None, reason=str(_triton.why_missing()))
def test_triton_operators_write_into_boundaries_and_gradients():
    """Inverted residuals, a layer indicator, the shuffle unit in one chain and, as a reduction, in two with a cat."""
    mbconv, shuffle = Block("mbconv", 3, 2), Block("shuffle", 3)
    space = tiny_space(
        resolution=8, stages=(Stage(16, 1, 2, (mbconv, shuffle)), Stage(16, 1, 1, (mbconv, shuffle, Block("identity"))))
    )
    with use_backend("triton"):
        graphs = compare(space, "bn", [[(0, 0)], [(1, 2), (1, 1)]], batch=2)
        if DEVICE == "cuda":
            return  # replays are no operators
        images, labels = random_batch(space, 2, device=DEVICE)
        before, after = {}, {}
        for path, counts in (((0, 2), before), ((1, 1), after)):
            with Copies() as copies:
                graphs.forward_backward(images, labels, [path])
            counts |= copies.found
    # images and labels; the loss; the trainable classifier
    assert before == {"copy_": 2, "clone": 1, "_foreach_copy_": 1}
    # the reduction besides: its cat, and the copy of that; the gradients of its two chains, their sum, its copy
    assert after == {"copy_": 4, "clone": 3, "_foreach_copy_": 1, "add": 1, "cat": 1}


emulates = pytest.mark.skipif(
    DEVICE == "cuda" or _native.why_no_emulation() is not None, reason="emulates the CUDA kernels"
)


@pytest.fixture
def emulated(monkeypatch):
    """Chains that the CUDA kernels have go there, as on a GPU."""
    for op in ("conv_bn_act", "inverted_residual", "conv_bn_act_chain"):
        (cuda,) = (backend for backend in backends._TABLE[op] if backend.name == "cuda")
        served = replace(cuda, can_use=lambda x: (storage_dtype(x) == torch.bfloat16, "its type"))
        monkeypatch.setitem(backends._TABLE, op, (served, *backends._TABLE[op]))


@pytest.fixture
def begun_by_launches(monkeypatch):
    """No chain begins the backward of the chain before: a launch does, whose bits are those of the eager engine."""
    monkeypatch.setattr(Offer, "begin_backward", lambda self, dx: None)


@emulates
def test_cuda_operators_write_into_boundaries_and_gradients(emulated, begun_by_launches, monkeypatch):
    taken = Counter()

    def counted(take, what):
        def taking(self, *arguments):
            buffer = take(self, *arguments)
            # the launchers of this machine's other backend ask for none
            taken[what] += buffer is not None
            return buffer

        return taking

    for name in ("take_image", "take_parameter_gradient"):
        monkeypatch.setattr(Offer, name, counted(getattr(Offer, name), name))
    blocks = Block("mbconv", 3, 2), Block("mbconv", 5, 1), Block("identity")
    space = tiny_space(resolution=8, stages=(Stage(16, 1, 2, blocks[:2]), Stage(16, 1, 1, blocks)))
    compare(space, "bn", [[(0, 0)], [(1, 1), (0, 2)]], batch=2, bf16=True, layer_indicators=False)
    # three BatchNorms of each first candidate, two of each second; result and input gradient of every candidate
    assert taken["take_parameter_gradient"] >= 2 * (3 + 3 + 2 + 2) and taken["take_image"] >= 4, taken


@emulates
@pytest.mark.parametrize("layer_indicators", [False, True])
def test_a_candidate_makes_what_the_layer_before_has_left(layer_indicators, emulated, begun_by_launches):
    """A reduction leaves a result to which nothing is added, a normal block one with its input, an identity none."""
    blocks = Block("mbconv", 3, 2), Block("mbconv", 3, 1), Block("identity")
    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, blocks),))
    # in the last step a candidate gets its input in two ways, and its gradients add up in the order of the paths
    steps = [[(0, 0, 0)], [(1, 2, 1), (2, 1, 2)], [(0, 0, 0), (0, 2, 0), (0, 1, 0)]]
    graphs = compare(space, "bn", steps, batch=2, bf16=True, layer_indicators=layer_indicators)
    # by choice, and how it gets its input: it is there, it is made, something is added to make it
    stem, first, second, third, head = graphs._segments
    assert set(stem) == {(None, None)} and set(first) == {(0, None), (1, None), (2, None)}
    assert set(second) == {(0, False), (1, False), (2, False), (1, None)}
    assert set(third) == {(0, True), (1, None), (2, True), (0, None)}
    assert set(head) == {(None, True), (None, None)}
    assert first[0, None].left.added is None and second[0, False].left.added is graphs._activations[2]
    # an identity reads its input by no chain, so a launch of its own makes it
    assert second[0, False].makes and not second[2, False].makes


class Reductions(TorchDispatchMode):
    """Counts the launches that begin the backward of what another chain has left."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.nasfast.conv_bn_act_chain_gpu_reduce
        return func(*args, **(kwargs or {}))


@emulates
def test_a_candidate_begins_the_backward_of_the_layer_before(emulated, monkeypatch, caplog):
    """So does the head, which is one chain. Its sums have another order than in the eager engine."""
    stages = set()

    def counted(x, chain, **options):
        stages.add(len(chain))
        return conv_bn_act_chain(x, chain, **options)

    monkeypatch.setattr(modules, "conv_bn_act_chain", counted)
    caplog.set_level(logging.DEBUG, logger="nasfast.engine.graphs")
    blocks = Block("mbconv", 3, 2), Block("mbconv", 3, 1), Block("identity")
    head = FixedLayer(Block("mbconv", 3, 3), 24), FixedLayer(Block("conv", 1), 32)
    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, blocks),), head=head)
    eager_net, net = networks(space, "bn", layer_indicators=False)
    images, labels = random_batch(space, 2, device=DEVICE)
    eager = EagerEngine(eager_net, 0.1, bf16=True)
    graphs = GraphEngine(net, tuple(images.shape), 0.1, True, capture())
    # the second time, what an earlier step has left there is NaN
    for paths, launches in [([(0, 0, 1)], 0), ([(0, 2, 1), (2, 1, 2)], 2)] * 2:
        want = eager.forward_backward(images, labels, paths)
        graphs.forward_backward(images, labels, paths)
        for buffer in graphs.buffers():
            buffer.fill_(torch.nan)
        with Reductions() as reductions:
            got = graphs.forward_backward(images, labels, paths)
        assert torch.equal(want.loss, got.loss) and reductions.count == launches
        expected, found = gradients(eager_net), gradients(net)
        assert expected.keys() == found.keys() and 4 in stages
        size = sum(float(gradient.norm()) ** 2 for gradient in expected.values()) ** 0.5
        for name, gradient in found.items():
            assert float((gradient - expected[name]).norm()) <= 2**-9 * size, name
    between = " is not joined to a neighbour, or only in part: "
    told = [
        (record.levelname, *record.message.split(between)) for record in caplog.records if between in record.message
    ]
    # the stem is no chain of these kernels; an identity comes in every layer
    assert told == [
        ("INFO", "the stem", Unjoined.WRITES.value),
        ("INFO", "layer 2 choice 1 (k3 e1)", Unjoined.DEPTHWISE.value),
        ("INFO", "layer 1 choice 2 (identity)", Unjoined.NO_CHAIN.value),
        ("DEBUG", "layer 0 choice 2 (identity)", Unjoined.NO_CHAIN.value),
        ("DEBUG", "layer 2 choice 2 (identity)", Unjoined.NO_CHAIN.value),
    ]


@emulates
def test_a_candidate_with_a_hook_neither_leaves_nor_makes(emulated, begun_by_launches):
    space = tiny_space(resolution=8, stages=(Stage(16, 3, 2, (Block("mbconv", 3, 2), Block("mbconv", 3, 1))),))

    seen = []

    def hooked(*arguments, **options):
        nets = networks(*arguments, **options)
        for net in nets:
            net.layers[1].candidates[0].register_forward_pre_hook(lambda module, given: seen.append(given[0].isnan()))
            net.layers[1].candidates[0].register_forward_hook(lambda module, given, y: seen.append(y.isnan()))
        return nets

    graphs = compare(space, "bn", [[(0, 0, 0)]] * 2, batch=2, bf16=True, make=hooked, layer_indicators=False)
    # what the hooks read in the second step, of both engines; before, buffers are not filled
    assert not any(nans.any() for nans in seen[-4:])
    assert graphs._segments[1][0, None].left is not None
    assert graphs._segments[2][0, False].left is None and not graphs._segments[2][0, False].makes


@emulates
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
    space = tiny_space(resolution=8)
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
        # the kernels that compute an expansion again do more with its weights than to round them
        rounds = stage.kind == Kind.POINTWISE and stage.saved_at is not None
        assert dtype == (torch.bfloat16 if rounds else torch.float32)
    assert {dtype for _, (dtype, _) in steps[0]} == {torch.bfloat16, torch.float32}
    copies = sum(copy.numel() * copy.element_size() for _, copy in engine._rounded._copies.values())
    assert 0 < copies <= engine.plan.rounded


def test_gradients_of_parameters_outside_the_path_are_none_after_an_eager_step_too():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    images, labels = random_batch(space, 4, device=DEVICE)
    engine = GraphEngine(net, tuple(images.shape), capture=capture())
    paths = [tuple(choice for _ in space.layers) for choice in range(3)]
    for x, y, path in ((images, labels, paths[0]), (images[:3], labels[:3], paths[1]), (images, labels, paths[2])):
        engine.forward_backward(x, y, [path])
        found = set(gradients(net))
        EagerEngine(net).forward_backward(x, y, [path])
        assert found == set(gradients(net))


def test_candidates_are_captured_once_and_only_when_needed():
    space = spaces.digits_mini()
    path = tuple(0 for _ in space.layers)
    graphs = compare(space, "bn", [[path]] * 3, layer_indicators=False)
    assert [len(found) for found in graphs._segments] == [1] * (len(space.layers) + 2)
    segment = graphs._segments[1][0, None]
    graphs.forward_backward(*random_batch(space, 4, device=DEVICE), [path])
    assert graphs._segments[1][0, None] is segment


def test_a_smaller_last_batch_runs_eagerly():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    engine = GraphEngine(net, (4, space.in_channels, space.resolution, space.resolution), capture=capture())
    images, labels = random_batch(space, 3, device=DEVICE)
    path = tuple(0 for _ in space.layers)
    result = engine.forward_backward(images, labels, [path])
    assert torch.equal(result.loss, EagerEngine(net).forward_backward(images, labels, [path]).loss)


def test_the_memory_plan_counts_boundaries_gradients_and_what_is_kept():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    engine = GraphEngine(net, (4, space.in_channels, space.resolution, space.resolution), capture=capture())
    plan = engine.plan
    held = sum(b.numel() * b.element_size() for b in engine._activations[1:])
    assert plan.boundaries == 2 * held
    assert plan.gradients == 4 * sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert len(plan.arenas) == len(space.layers) + 2 and all(plan.arenas[1:])
    assert plan.total == plan.boundaries + plan.gradients + plan.rounded + sum(plan.arenas)
    assert "CUDA graphs:" in str(plan) and "kept activations" in str(plan)


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


def test_a_candidate_whose_memory_cannot_be_planned_is_named():
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    net.layers[1].candidates[2].register_forward_hook(lambda module, inputs, y: y * y.sum().item())
    shape = (4, space.in_channels, space.resolution, space.resolution)
    with pytest.raises(EngineError, match=r"layer 1 choice 2 \(.*\) does not run on fake tensors"):
        GraphEngine(net, shape, capture=EagerCapture())


def test_too_little_memory_says_how_much_is_missing(monkeypatch):
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    shape = (4, space.in_channels, space.resolution, space.resolution)
    engine = GraphEngine(net, shape, capture=EagerCapture())
    with pytest.raises(EngineError, match=r"CUDA graphs: .* but only 0 MiB are free: use a smaller batch"):
        engine.check_memory(free=100)


class FailingCapture(EagerCapture):
    """Cannot capture from the third segment on."""

    def __init__(self):
        self.count = 0

    def capture(self, functions, pool):
        self.count += 1
        if self.count > 2:
            raise RuntimeError("out of something")
        return super().capture(functions, pool)


def test_a_candidate_that_cannot_be_captured_raises_or_falls_back_with_one_message(caplog):
    space = spaces.digits_mini()
    _, net = networks(space, "bn")
    images, labels = random_batch(space, 4, device=DEVICE)
    path = tuple(0 for _ in space.layers)
    strict = GraphEngine(net, tuple(images.shape), capture=FailingCapture())
    with pytest.raises(EngineError, match=r"layer 1 choice 0 \(.*\) could not be captured: out of something"):
        strict.forward_backward(images, labels, [path])
    lenient = GraphEngine(net, tuple(images.shape), capture=FailingCapture(), strict=False)
    want = EagerEngine(net).forward_backward(images, labels, [path])
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        for _ in range(2):
            assert torch.equal(lenient.forward_backward(images, labels, [path]).loss, want.loss)
    assert [r.message for r in caplog.records] == [
        f"goes on without CUDA graphs: layer 1 choice 0 ({space.label(1, 0)}) could not be captured: out of something"
    ]
