"""The floor model: MACs against the closed forms, bytes against a block counted by hand."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from benchmarks import floor
from nasfast.ops.modules import ConvBNAct, InvertedResidual
from nasfast.spaces import mean_path, mobilenet_v2, nas_bench_macro, shufflenet_v2
from nasfast.supernet import StandaloneNetwork

# one fp32 element or one FLOP per second, so that a floor in seconds is a count
BYTES = floor.Machine(bytes=4.0, matmul=float("inf"), vector=float("inf"))
FLOPS = floor.Machine(bytes=float("inf"), matmul=1.0, vector=1.0)


@pytest.mark.parametrize("space", [mobilenet_v2(), shufflenet_v2(), nas_bench_macro()], ids=lambda s: s.name)
def test_macs_are_those_of_the_space(space):
    path = mean_path(space)
    trace = floor.trace(lambda: StandaloneNetwork(space, path), (2, 3, space.resolution, space.resolution))
    assert trace.macs == 2 * space.cost(path).macs


def test_arithmetic_of_a_step_is_forward_and_input_gradients():
    """The stem has no input gradient, and nothing has a weight gradient."""
    space = mobilenet_v2()
    path = mean_path(space)
    trace = floor.trace(lambda: StandaloneNetwork(space, path), (1, 3, 224, 224))
    stem = trace.convs[0].macs
    seconds = floor.step_floor(trace, FLOPS, torch.float32)
    assert seconds.forward == 2 * trace.macs
    assert seconds.backward == 2 * (trace.macs - stem)
    assert seconds.step == seconds.forward + seconds.backward


class _Net(nn.Module):
    """Stem, two residual blocks, pool and classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvBNAct(3, 8, 3, stride=2)
        self.blocks = nn.Sequential(*(InvertedResidual(8, 8, kernel_size=3, stride=1, expand=2) for _ in range(2)))
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


def test_bytes_by_hand():
    trace = floor.trace(_Net, (2, 3, 8, 8))
    assert [conv.depthwise for conv in trace.convs] == [False] + [False, True, False] * 2
    small, wide, image = 2 * 8 * 16, 2 * 16 * 16, 2 * 3 * 64
    weights = [8 * 3 * 9] + [8 * 16, 16 * 9, 16 * 8] * 2
    # each convolution reads its input, writes its output; the second block reads both terms of its residual sum and
    # writes it, because it is needed again; pool and classifier
    convs = [(image, small)] + [(small, wide), (wide, wide), (wide, small)] * 2
    forward = sum(x + y for x, y in convs) + 2 * small + sum(weights) + small + 40
    # gradient and output of each convolution, its input for the mask, and the written gradient; the last gradient comes
    # from the pool; the stem's own gradient is only summed; each skip adds one read
    backward = sum(2 * y + 2 * x for x, y in convs[1:]) - small - small + 2 * small + sum(weights[1:]) + small + 40
    got = floor.step_floor(trace, BYTES, torch.float32)
    assert got.forward == forward
    assert got.backward == backward
    half = floor.step_floor(trace, BYTES, torch.bfloat16)
    assert (half.forward, half.backward) == (forward / 2, backward / 2)


def test_bytes_of_a_unit_alone_by_hand():
    trace = floor.trace(lambda: ConvBNAct(8, 16, 1), (2, 8, 4, 4))
    x, y, weight = 2 * 8 * 16, 2 * 16 * 16, 8 * 16
    got = floor.alone_floor(trace, BYTES, torch.float32)
    assert got.forward == (x + y + weight) + 2 * y
    assert got.backward == 2 * y + (2 * y + x + weight)
    # the images need no gradient, so only the sums for gamma and beta remain
    assert floor.alone_floor(trace, BYTES, torch.float32, input_grad=False).backward == 2 * y


def test_the_slower_of_bytes_and_arithmetic_counts():
    trace = floor.trace(lambda: ConvBNAct(8, 16, 1), (2, 8, 4, 4))
    bytes_only = floor.alone_floor(trace, BYTES, torch.float32).forward
    both = floor.alone_floor(trace, floor.Machine(4.0, 1e9, 1e9), torch.float32).forward
    assert both == bytes_only
    assert floor.alone_floor(trace, floor.Machine(1e18, 1.0, 1.0), torch.float32).forward == pytest.approx(
        2 * trace.macs
    )


def test_tracing_a_known_network_takes_no_memory_and_no_weights():
    # about 100 GB if it were real
    trace = floor.trace(torchvision.models.mobilenet_v2, (4096, 3, 224, 224))
    assert trace.macs == 4096 * 300_774_272


def test_machine_is_measured():
    machine = floor.measure_machine(torch.bfloat16, quick=True)
    assert all(1e8 < rate < 1e16 for rate in machine)
