"""Counters by which the programs of a launch learn which of them ends last.

A launch needs counters that are zero, and sets them to zero again (csrc/gpu/statistics.h), so nothing has to
clear them between launches. Two launches that may run at the same time must not share counters:

- Launches on one stream run one after the other, so they share the counters of the stream.
- A captured launch may be replayed on any stream at any time, so no other launch gets its counters. CUDA never runs one
  graph twice at the same time.
- Every launch of the emulation gets its own counters. On a GPU, a kernel that fails ends the CUDA context and its
  memory, and a launch that fails does not touch the counters.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

# the smallest number of counters of a stream, and the number in one block for captured launches
_STREAM, _BLOCK = 1 << 14, 1 << 20

_streams: dict[tuple[int | None, int], Tensor] = {}
# The blocks of each device, kept forever because graphs hold addresses in them, and the number of counters of the last
# block that are in use.
_blocks: dict[int | None, list[Tensor]] = {}
_used: dict[int | None, int] = {}
_lock = Lock()


def zeros(count: int, device: torch.device) -> Tensor:
    """Counters for one launch on the current stream of `device`: int32 zeros, (count,). The launch leaves zeros."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _lock:
        if torch.cuda.is_current_stream_capturing():
            begin = _used.get(device.index, _BLOCK)
            if begin + count > _BLOCK:
                # then the graph makes the zeros in its own memory at every replay
                return torch.zeros(count, dtype=torch.int32, device=device)
            _used[device.index] = begin + count
            return _blocks[device.index][-1][begin : begin + count]
        # A capture cannot make a block, so launches outside of it make one in time; every capture has a warm-up.
        if device.index not in _blocks or _used[device.index] > _BLOCK // 2:
            _blocks.setdefault(device.index, []).append(_filled(_BLOCK, device))
            _used[device.index] = 0
        key = device.index, torch.cuda.current_stream(device).cuda_stream
        if key not in _streams or _streams[key].numel() < count:
            _streams[key] = _filled(max(count, _STREAM), device)
        return _streams[key][:count]


def _filled(count: int, device: torch.device) -> Tensor:
    # A copy from pageable memory has ended when the call returns, so any stream may read the result.
    return torch.zeros(count, dtype=torch.int32).to(device)
