"""Many independent calculations at once, each on one thread."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def on_threads(function: Callable[[Item], Result], items: Sequence[Item], work: Sequence[float]) -> list[Result]:
    """function(item) of each item, each calculated on one thread and without gradients: so threads change no bit.

    Args:
        function: what is calculated; PyTorch must do most of it, because Python itself runs one thread at a time.
        items: its arguments.
        work: operations that each item takes, in any unit: the longest begin first, so that all threads end together.

    Raises:
        Exception: what `function` raises; no item begins after that, nor after an interrupt.
    """
    results: list[Result | None] = [None] * len(items)
    queue = iter(sorted(range(len(items)), key=work.__getitem__, reverse=True))

    def run() -> None:
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for i in queue:  # shared by the threads
                    results[i] = function(items[i])
        finally:
            stop()

    def stop() -> None:
        deque(queue, maxlen=0)

    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count) as threads:
            try:
                for done in [threads.submit(run) for _ in range(min(count, len(items)))]:
                    done.result()
            finally:
                stop()
    finally:
        torch.set_num_threads(count)  # what a worker sets holds for threads that begin later, too
    return cast(list[Result], results)
