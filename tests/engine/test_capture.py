"""Captures that fail: which error is raised, and that the device works afterwards as before.

Without a GPU on a stand-in for torch.cuda, which does what torch 2.11's CUDAGraph.cpp does when a capture ends badly.
"""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from nasfast import spaces
from nasfast.engine import EagerEngine, GraphEngine
from nasfast.engine.capture import CudaCapture
from nasfast.measure.timing import random_batch
from nasfast.supernet import Supernet

POOL = (0, 1)


class FakeCuda:
    """The state of a device that captures change.

    Attributes:
        current: name of the current stream.
        capturing: the graph that is being captured.
        invalid: whether CUDA has given that capture up.
        underway: pools that the allocator serves instead of its own memory.
        random: whether the generator counts for a graph instead of for the stream.
        waits: streams that waited for another, and for which.
    """

    def __init__(self):
        self.current, self.capturing, self.invalid = "default", None, False
        self.underway, self.random, self.waits = [], False, []

    def stream(self, name):
        return SimpleNamespace(
            name=name, device=torch.device("cuda", 0), wait_stream=lambda other: self.waits.append((name, other.name))
        )

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def synchronizes(self):
        """What .item() does."""
        if self.capturing is not None:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")

    def end_allocation(self, device, pool):
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def set_generator(self, generator):
        self.random = generator.random

    @property
    def state(self):
        return self.current, self.capturing, tuple(self.underway), self.random


def fake_graph(cuda):
    class Graph:
        def capture_begin(self, *, pool, capture_error_mode):
            assert cuda.current == "side" and cuda.capturing is None and capture_error_mode == "thread_local"
            cuda.capturing, cuda.invalid, cuda.random, self.pool = self, False, True, pool
            cuda.underway.append(pool)

        def capture_end(self):
            if cuda.capturing is not self or cuda.current != "side":
                raise RuntimeError("Capture must end on the same stream it began on.")
            cuda.capturing = None
            if cuda.invalid:
                raise RuntimeError("operation failed due to a previous error during capture")
            cuda.end_allocation(0, self.pool)
            cuda.random = False

        def replay(self):
            pass

    return Graph


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()

    @contextmanager
    def device(_):
        yield

    generator = SimpleNamespace(
        clone_state=lambda: SimpleNamespace(random=False), graphsafe_set_state=fake.set_generator
    )
    for name, value in {
        "Stream": lambda device: fake.stream("side"),
        "current_stream": lambda: fake.stream(fake.current),
        "stream": fake.on,
        "device": device,
        "CUDAGraph": fake_graph(fake),
        "graph_pool_handle": lambda: POOL,
        "synchronize": fake.synchronizes,
        "empty_cache": fake.synchronizes,
        "default_generators": (generator,),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.memory, "_cuda_endAllocateToPool", fake.end_allocation)
    return fake


class Failing:
    """A function that fails when it is being captured, or before.

    Args:
        how: `python`: an error that CUDA does not see; `item`: a synchronisation; `silent`: one that raises only when
            the capture ends; `warm-up`: before the capture.
    """

    def __init__(self, cuda, how, error):
        self.cuda, self.how, self.error = cuda, how, error

    def __call__(self):
        if self.how == "warm-up":
            raise self.error
        if self.cuda.capturing is None:
            return
        if self.how == "item":
            self.cuda.synchronizes()
        elif self.how == "silent":
            self.cuda.invalid = True
        else:
            raise self.error


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("python", ValueError("of the function"), "of the function"),
        ("python", torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        ("python", KeyboardInterrupt("by hand"), "by hand"),
        ("item", RuntimeError(), "not permitted when stream is capturing"),
        ("silent", RuntimeError(), "failed due to a previous error during capture"),
        ("warm-up", torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory"),
    ],
    ids=["error", "memory", "interrupt", "item", "silent", "warm-up"],
)
def test_a_capture_that_fails_raises_the_error_of_the_function_and_restores_the_device(cuda, how, error, message):
    capture, before = CudaCapture(torch.device("cuda", 0)), cuda.state
    pool = capture.pool()
    with pytest.raises(type(error), match=message) as raised:
        capture.capture([lambda: None, Failing(cuda, how, error)], pool)
    assert cuda.state == before
    assert cuda.waits == [("side", "default"), ("default", "side")]
    if how == "item":
        assert raised.value.__notes__ == [
            "while its capture was ended: operation failed due to a previous error during capture"
        ]
    assert len(capture.capture([lambda: None] * 2, pool)) == 2
    assert cuda.state == before


def test_a_run_whose_capture_fails_goes_on_eagerly_and_loses_nothing(cuda, caplog):
    space = spaces.digits_mini()
    nets = [Supernet(space, seed=3) for _ in range(2)]
    for net in nets:
        net.freeze("bn")
        net.to(memory_format=torch.channels_last).train()
    want_net, net = nets
    # the third segment waits for the device
    net.layers[1].candidates[0].register_forward_hook(lambda *_: cuda.synchronizes())
    images, labels = random_batch(space, 4, device="cpu")
    path = tuple(0 for _ in space.layers)
    engine = GraphEngine(net, tuple(images.shape), capture=CudaCapture(torch.device("cuda", 0)), strict=False)
    before, captured = cuda.state, engine._segments
    want_engine = EagerEngine(want_net)
    optimizers = [torch.optim.SGD([p for p in n.parameters() if p.requires_grad], 0.5, 0.9) for n in nets]
    with caplog.at_level(logging.WARNING, logger="nasfast"):
        for _ in range(2):
            want, got = (e.forward_backward(images, labels, [path]) for e in (want_engine, engine))
            assert torch.equal(want.loss, got.loss) and torch.equal(want.correct, got.correct)
            assert cuda.state == before
            for optimizer in optimizers:
                optimizer.step()
    for (name, tensor), got in zip(want_net.state_dict().items(), net.state_dict().values(), strict=True):
        assert torch.equal(tensor, got), name
    assert [len(choices) for choices in captured[:3]] == [1, 1, 0]
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"goes on without CUDA graphs: layer 1 choice 0 ({space.label(1, 0)}) could not be captured: operation not "
        "permitted when stream is capturing"
    ]


@pytest.mark.parametrize("how", ["item", "python"])
def test_a_failed_capture_leaves_a_gpu_usable(how, gpu):
    device = torch.device("cuda", torch.cuda.current_device())
    capture, stream = CudaCapture(device), torch.cuda.current_stream()
    x, y = torch.arange(4.0, device=device), torch.zeros(4, device=device)
    pool = capture.pool()

    def fails():
        torch.rand(3, device=device)
        if how == "item":
            x.sum().item()
        elif torch.cuda.is_current_stream_capturing():
            raise ValueError("of the function")

    def works():
        y.copy_(x * 2)

    message = "captur" if how == "item" else "of the function"
    with pytest.raises(RuntimeError if how == "item" else ValueError, match=message):
        capture.capture([works, fails], pool)
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()  # refuses while a pool is served
    assert torch.rand(3, device=device).shape == (3,)
    (replay,) = capture.capture([works], pool)
    x.add_(1)
    replay()
    assert y.tolist() == [2.0, 4.0, 6.0, 8.0]
