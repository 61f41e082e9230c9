"""Counters with which the programs of a launch find out which of them comes last.

A launch needs zeros, and leaves zeros (_comes_last in _triton/common.py), so no other launch has to make them. Two
launches that may run at the same time must not share counters:

- Launches of one stream run one after the other. They share the stream's counters.
- A captured launch is replayed on any stream, at any time. It gets counters that no other launch ever gets. CUDA does
  not run one graph twice at the same time.
- Under the interpreter every launch gets its own, because an exception in a kernel may leave anything there. On a GPU
  a kernel that fails ends the CUDA context, and with it the counters; one that cannot be launched does not touch them.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

# counters of one stream at least, and of one block for captured launches
_STREAM, _BLOCK = 1 << 14, 1 << 20
# counters in 16 bytes
_ALIGNMENT = 4

_streams: dict[tuple[int | None, int], Tensor] = {}
# blocks of each device, kept forever because graphs hold addresses in them, and how much of the last one is given away
_blocks: dict[int | None, list[Tensor]] = {}
_given: dict[int | None, int] = {}
_lock = Lock()


def zeros(count: int, device: torch.device) -> Tensor:
    """(count,) int32 zeros for one launch on the current stream of `device`, which leaves them zero."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    with _lock:
        if torch.cuda.is_current_stream_capturing():
            return _for_capture(count, device)
        # a capture cannot make a block: launches outside, such as its warm-up, provide for it
        if device.index not in _blocks or _given[device.index] > _BLOCK // 2:
            _blocks.setdefault(device.index, []).append(_filled(_BLOCK, device))
            _given[device.index] = 0
        key = device.index, torch.cuda.current_stream(device).cuda_stream
        if key not in _streams or _streams[key].numel() < count:
            _streams[key] = _filled(max(count, _STREAM), device)
        return _streams[key][:count]


def _for_capture(count: int, device: torch.device) -> Tensor:
    begin = _given.get(device.index, _BLOCK)
    if begin + count > _BLOCK:
        # the graph itself then makes zeros, in its own memory, at every replay
        return torch.zeros(count, dtype=torch.int32, device=device)
    # Triton compiles a kernel again for an address that is not a multiple of 16 bytes
    _given[device.index] = begin + -(-count // _ALIGNMENT) * _ALIGNMENT
    return _blocks[device.index][-1][begin : begin + count]


def _filled(count: int, device: torch.device) -> Tensor:
    # when a copy from pageable memory returns, any stream may read it
    return torch.zeros(count, dtype=torch.int32).to(device)
