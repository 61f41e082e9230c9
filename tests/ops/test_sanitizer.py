"""Whether the run of `make sanitize` would see an error, were there one."""

import os
import subprocess
import sys

import pytest

from nasfast.ops import _native

# x claims a row of pixels more than it has
READ_BEYOND = """
import numpy as np, torch
from nasfast import ops
rows = np.ones((1, 32, 32, 16), dtype=np.float32)
x = torch.from_numpy(np.lib.stride_tricks.as_strided(rows, (1, 33, 32, 16), rows.strides)).permute(0, 3, 1, 2)
ops.conv_bn_act(x, torch.ones({weight}), torch.ones(16), torch.zeros(16), {geometry}, backend="cpu")
"""
CONVS = {
    "pointwise": {"weight": "16, 16, 1, 1", "geometry": "padding=0"},
    "depthwise": {"weight": "16, 1, 3, 3", "geometry": "padding=1, groups=16"},
}


@pytest.fixture(autouse=True)
def sanitized():
    if "ASAN_OPTIONS" not in os.environ:
        pytest.skip("not the run of make sanitize")


def test_the_build_under_test_is_the_sanitized_one():
    assert "-fsanitize=address,undefined" in _native.extension.build_info().flags, _native.extension.path


@pytest.mark.parametrize("conv", CONVS.values(), ids=CONVS)
@pytest.mark.parametrize("isa", _native.extension.usable_isas() if _native.extension else [])
def test_a_read_beyond_the_input_is_seen(isa, conv):
    result = subprocess.run(
        [sys.executable, "-c", READ_BEYOND.format(**conv)],
        env={**os.environ, "NASFAST_ISA": isa},
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr and isa in result.stderr, result.stderr
