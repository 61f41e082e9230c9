"""The graph engine captures only what a CUDA graph can record; this is checked on CPU tensors, operator by operator.

A graph records launches. Whatever looks at a number on the host, or allocates as much as a number says, is impossible
in it, and an error only on a GPU.
"""

from importlib import import_module

import pytest
import torch
from kernel_cases.cuda import needs_emulation
from tiny import tiny_space
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.captures import EagerCapture
from benchmarks.gpu.launches import CHAIN_OPERATORS
from nasfast import spaces, use_backend
from nasfast.engine import GraphEngine
from nasfast.ops import _triton
from nasfast.ops.chain.deferred import DeferredNorm, DeferredResult
from nasfast.spaces import Block, SqueezeExcite, Stage
from nasfast.supernet import Supernet

pytestmark = pytest.mark.skipif(
    _triton.why_missing() is not None or not _triton.interpreted(), reason="needs Triton and no GPU"
)
SPACES = {
    "mobilenet_v2": lambda: spaces.mobilenet_v2(resolution=64),
    "shufflenet_v2": lambda: spaces.shufflenet_v2(resolution=64),
    "nas_bench_macro": spaces.nas_bench_macro,
    "digits_mini": spaces.digits_mini,
}
# they read numbers on the host without an operator that a mode sees on CPU tensors
HOST_METHODS = ("tolist", "numpy", "__array__", "cpu", "cuda", "pin_memory")


class Refused(RuntimeError):
    """A CUDA graph cannot record this."""


class Rules(TorchDispatchMode):
    """Refuses operators that a CUDA graph cannot record, those that launchers call included.

    Attributes:
        seen: namespaces whose launchers were called, and the operators that launch CUDA kernels.
    """

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace in LAUNCHERS:
            self.seen.add(namespace)
            with self:  # inside an operator the mode does not hold by itself
                return launchers(namespace)[name](*args, **kwargs)
        if name in CHAIN_OPERATORS:
            self.seen.add(name)
            return None  # it only launches kernels, whose emulation would take long
        if torch.Tag.data_dependent_output in func.tags:
            raise Refused(f"{func} reads a number on the host")
        if func is torch.ops.aten.lift_fresh.default:
            raise Refused(f"{func}: numbers from the host need a copy")
        if torch.Tag.dynamic_output_shape in func.tags and not is_index_of_integers(func, args):
            raise Refused(f"{func}: the shape of the result depends on numbers")
        devices = {t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.ndim}
        if len(devices | ({torch.device(kwargs["device"]).type} if kwargs.get("device") else set())) > 1:
            raise Refused(f"{func} goes from one device to another")
        return func(*args, **kwargs)


LAUNCHERS = {"nasfast_triton": ["nasfast.ops.triton"], "nasfast_cuda": ["nasfast.ops.chain.cuda"]}


def launchers(namespace):
    modules = map(import_module, LAUNCHERS[namespace])
    ends = ("_fwd", "_bwd")
    return {name: f for module in modules for name, f in vars(module).items() if name.endswith(ends)}


def is_index_of_integers(func, args):
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return all(i is None or i.dtype in (torch.int32, torch.int64) for i in args[1])


@pytest.fixture
def rules(monkeypatch):
    """The rules, which also refuse what no mode sees."""

    def refuse(name):
        def method(self, *args, **kwargs):
            raise Refused(f"Tensor.{name} reads numbers on the host")

        return method

    for name in HOST_METHODS:
        monkeypatch.setattr(torch.Tensor, name, refuse(name))
    return Rules()


class CheckedCapture(EagerCapture):
    """Runs what is captured once, under the rules.

    Attributes:
        count: functions so far.
    """

    def __init__(self, rules):
        self.rules, self.count = rules, 0

    def capture(self, functions, pool):
        for function in functions:
            with self.rules:
                function()
            self.count += 1
        return list(functions)


def supernet(space, trainable="bn"):
    net = Supernet(space, init="gaussian")
    net.freeze(trainable)
    return net.to(memory_format=torch.channels_last).train()


def checked_engine(net, rules, *, bf16=False):
    space = net.space
    shape = (2, space.in_channels, space.resolution, space.resolution)
    return GraphEngine(net, shape, 0.1, bf16, CheckedCapture(rules))


def record_every_candidate(engine, space, *, deferred=False):
    """Record each kind of candidate once: two layers with the same blocks, stride and kind of layer record the same.

    deferred: whether the layer before defers its last BatchNorm to them.
    """
    seen = set()
    for i, (_, choices) in enumerate(engine._layers):
        layer = space.layers[i - 1] if 0 < i <= len(space.layers) else None
        for choice in choices:
            kind = (layer.choices[choice], layer.stride, layer.normal) if layer else i
            if kind not in seen:
                seen.add(kind)
                x = engine._boundaries[i].x
                engine._segment(i, choice, DeferredResult(DeferredNorm.empty(x)) if deferred and i > 0 else None)
    assert engine.capture.count > len(seen)


@pytest.mark.parametrize(
    ("name", "trainable"),
    [
        *((name, "bn") for name in ("mobilenet_v2", "shufflenet_v2", "nas_bench_macro")),
        ("digits_mini", "indicators"),
        ("digits_mini", "all"),
    ],
)
def test_every_candidate_can_be_recorded(name, trainable, rules, monkeypatch):
    space = SPACES[name]()
    from triton.runtime.interpreter import InterpretedFunction

    launches = []
    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *args, **kwargs: launches.append(args))
    with use_backend("triton"):
        # convolutions that train are PyTorch's, which bfloat16 makes slow here
        engine = checked_engine(supernet(space, trainable), rules, bf16=trainable != "all")
        record_every_candidate(engine, space)
    assert launches


@needs_emulation
@pytest.mark.parametrize(("trainable", "deferred"), [("indicators", False), ("bn", False), ("bn", True)])
def test_every_candidate_on_the_cuda_kernels_can_be_recorded(trainable, deferred, rules, monkeypatch):
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    space = spaces.digits_mini()
    with use_backend("cuda"):
        engine = checked_engine(supernet(space, trainable), rules, bf16=True)
        record_every_candidate(engine, space, deferred=deferred)
    assert rules.seen == (set(CHAIN_OPERATORS) if deferred else set(CHAIN_OPERATORS[::3]))


@needs_emulation
def test_chains_inside_of_other_candidates_can_be_recorded(rules, monkeypatch):
    monkeypatch.setenv("NASFAST_EMULATE_CUDA", "1")
    space = tiny_space(resolution=8, stages=(Stage(16, 2, 2, (Block("mbconv", 3, 2, se=SqueezeExcite(0.25)),)),))
    with use_backend("cuda"):
        record_every_candidate(checked_engine(supernet(space), rules, bf16=True), space)
    assert "nasfast_cuda" in rules.seen
