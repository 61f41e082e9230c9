"""Kernels of a step are matched with the convolutions of its network."""

import pytest

from benchmarks.gpu.passes import passes_of
from nasfast.config import ConfigError
from nasfast.measure.floor import Machine, conv_floor, trace
from nasfast.spaces import digits_mini, mean_path
from nasfast.supernet import StandaloneNetwork

HERE = Machine(bytes=4000.0, matmul=1e30, vector=1e30)


def test_kernels_are_matched_with_the_convolutions_of_the_network():
    space = digits_mini()
    path = mean_path(space)
    traced = trace(lambda: StandaloneNetwork(space, path), (2, space.in_channels, space.resolution, space.resolution))
    forward = [("depthwise_forward_kernel" if c.depthwise else "pointwise_forward_kernel", 1.0) for c in traced.convs]
    backward = [("pointwise_backward_kernel", 2.0)] * (len(traced.convs) - 1)
    kernels = [("elementwise", 9.0), *forward, ("softmax", 9.0), *backward]
    passes = passes_of(kernels, traced)
    want = [conv_floor(c, HERE, 4, backward=False) for c in traced.convs]
    want += [conv_floor(c, HERE, 4, backward=True) for c in traced.convs[:0:-1]]
    assert [p.floor(HERE, 4) for p in passes] == want
    assert sum(p.ms for p in passes) == len(forward) + 2 * len(backward)
    with pytest.raises(ConfigError, match="every convolution must run on the Triton kernels"):
        passes_of(kernels[2:], traced)
