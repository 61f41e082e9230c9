"""Turning functions on static buffers into CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

Replay = Callable[[], Any]

# kernels compile, and libraries choose their algorithms, before capture
_WARMUP = 2


class Capture(Protocol):
    """Turns functions on static buffers into replays of what they did."""

    def pool(self) -> Any:
        """Memory that captures may share, if no two of them are in use at once."""
        ...

    def capture(self, functions: Sequence[Replay], pool: Any) -> list[Replay]:
        """Replays of functions that are called in this order; each may use what those before it left.

        An error of a function is raised as it is, and leaves the device as usable as an error without a capture.
        """
        ...


class CudaCapture:
    """CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, functions: Sequence[Replay], pool: Any) -> list[Replay]:
        with torch.cuda.device(self.device):
            self._warm_up(functions)
            # memory that the allocator keeps for others cannot serve the pool
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return [self._record(function, pool).replay for function in functions]

    def _warm_up(self, functions: Sequence[Replay]) -> None:
        caller = torch.cuda.current_stream()
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self.stream):
                for _ in range(_WARMUP):
                    for function in functions:
                        function()
        finally:
            # after an error too: kernels may still write to memory that is free now
            caller.wait_stream(self.stream)

    def _record(self, function: Replay, pool: Any) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would hide an error of the function behind that of ending the capture which it made invalid,
        # and in torch 2.11 also leave its stream the current one
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            try:
                # other threads, such as one that pins memory for a loader, may go on
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                function()
                graph.capture_end()
            except BaseException as error:
                self._abandon(graph, pool, error)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any, error: BaseException) -> None:
        """End a capture that failed, so that the stream, the allocator and random numbers work as before it."""
        try:
            graph.capture_end()
        except RuntimeError as ending:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"while its capture was ended: {ending}")
        # capture_end does not get to these where CUDA called the capture invalid; where it did, the first one raises
        with suppress(RuntimeError):
            torch.cuda.memory._cuda_endAllocateToPool(self.stream.device.index, pool)
        generator = torch.cuda.default_generators[self.stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())  # in torch 2.11 the old one goes on capturing
