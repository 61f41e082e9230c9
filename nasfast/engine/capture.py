"""Captures functions that use static buffers as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

Replay = Callable[[], Any]

# number of calls before a capture, in which kernels are compiled and libraries choose their algorithms
_WARMUP = 2


class Capture(Protocol):
    """Turns functions that use static buffers into replays of what they do."""

    def pool(self) -> Any:
        """A memory pool for captures of which only one is in use at any time."""
        ...

    def capture(self, functions: Sequence[Replay], pool: Any) -> list[Replay]:
        """Capture the functions in this order; each may use the results of those before it.

        Every function runs at least once, because what it finds out then may decide what is captured next.

        Returns:
            One replay per function.

        Raises:
            Exception: an error of a function, unchanged. The device can then be used as after the same error without a
                capture.
        """
        ...


class CudaCapture:
    """Captures functions as CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, functions: Sequence[Replay], pool: Any) -> list[Replay]:
        with torch.cuda.device(self.device):
            self._warm_up(functions)
            # the pool cannot use free memory that the allocator keeps for other pools
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
            # also after an error, because kernels may still write to memory that is free now
            caller.wait_stream(self.stream)

    def _record(self, function: Replay, pool: Any) -> torch.cuda.CUDAGraph:
        # After an error of the function, torch.cuda.graph raises another one from the end of the invalid capture, and
        # in torch 2.11 its stream stays the current one.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            try:
                # other threads may continue to use CUDA, such as one that pins memory for a loader
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                function()
                graph.capture_end()
            except BaseException as error:
                self._abandon(graph, pool, error)
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any, error: BaseException) -> None:
        """End a failed capture, so that the stream, the allocator and random numbers work as before."""
        try:
            graph.capture_end()
        except RuntimeError as ending:
            error.add_note(f"while its capture was ended: {ending}")
        # If the capture is invalid, capture_end stops before these two steps. Otherwise it has done them, and the first
        # one raises here.
        with suppress(RuntimeError):
            torch.cuda.memory._cuda_endAllocateToPool(self.stream.device.index, pool)
        generator = torch.cuda.default_generators[self.stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())  # in torch 2.11 the old state stays in capture mode
