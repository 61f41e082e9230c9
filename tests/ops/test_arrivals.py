"""Counters of launches: which launches share them."""

from types import SimpleNamespace

import pytest
import torch

from nasfast.ops import arrivals

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    """A CUDA device as far as arrivals.py sees one: the current stream, whether it captures, and host memory."""
    state = SimpleNamespace(stream=7, capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.stream))
    monkeypatch.setattr(arrivals, "_filled", lambda count, device: torch.zeros(count, dtype=torch.int32))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
    for name in ("_streams", "_blocks", "_used"):
        monkeypatch.setattr(arrivals, name, {})
    monkeypatch.setattr(arrivals, "_BLOCK", 100)
    return state


def overlap(a, b):
    begin, end = max(a.data_ptr(), b.data_ptr()), min(t.data_ptr() + 4 * t.numel() for t in (a, b))
    return begin < end


def test_launches_of_one_stream_share_counters_and_streams_do_not(cuda):
    first, again = arrivals.zeros(5, GPU), arrivals.zeros(9, GPU)
    assert first.tolist() == [0] * 5 and first.data_ptr() == again.data_ptr()
    cuda.stream = 8
    assert not overlap(first, arrivals.zeros(5, GPU))
    assert arrivals.zeros(10**5, GPU).numel() == 10**5


def test_a_captured_launch_shares_counters_with_nobody(cuda):
    outside = arrivals.zeros(5, GPU)
    cuda.capturing = True
    counters = [arrivals.zeros(30, GPU) for _ in range(3)]
    counters.append(arrivals.zeros(30, GPU))  # the block is used up: the graph makes its own
    cuda.capturing = False
    counters += [outside, arrivals.zeros(5, GPU).clone()]
    cuda.capturing = True
    counters += [arrivals.zeros(30, GPU) for _ in range(3)]
    assert all(t.tolist() == [0] * t.numel() for t in counters)
    assert not any(overlap(a, b) for i, a in enumerate(counters) for b in counters[:i])


def test_a_capture_before_any_other_launch_has_counters(cuda):
    cuda.capturing = True
    assert arrivals.zeros(5, GPU).tolist() == [0] * 5
