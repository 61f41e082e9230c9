"""What the Triton kernels of a real step are given to read and write, beside the floor."""

import json

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def step(program, tmp_path_factory):
    """The mean path of the 6^20 space at batch 32 in bf16."""
    out = tmp_path_factory.mktemp("traffic") / "traffic.json"
    program("-m", "benchmarks.gpu_model.traffic", "--dtypes", "bf16", "--out", str(out), TRITON_INTERPRET="1")
    (row,) = json.loads(out.read_text())["rows"]
    return row


def test_a_step_moves_little_more_than_the_floor(step):
    # the gradients of expansions are written and read too
    assert 1 <= step["times_the_floor"] < 1.15


def test_every_convolution_is_on_the_kernels(step):
    launches = {name: found["launches"] for name, found in step["kernels"].items()}
    forward = launches["pointwise_forward_kernel"] + launches["depthwise_forward_kernel"]
    # all but the stem, whose images need no gradient
    assert launches["pointwise_backward_kernel"] + launches["depthwise_backward_kernel"] == forward - 1
