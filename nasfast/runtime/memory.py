"""Whether the C library keeps the memory that is freed, instead of giving it back to the system."""

from __future__ import annotations

import ctypes

# options of mallopt (malloc.h) and glibc's own values of them
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_GIVEN_BACK = {_MMAP_MAX: 65_536, _TRIM_THRESHOLD: 128 * 1024, _TOP_PAD: 128 * 1024}
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}


def keep_freed_memory(keep: bool = True) -> bool:
    """Let glibc keep the pages of memory that is freed, for the next tensor.

    By default glibc gives each large block back to the system when it is freed. PyTorch frees one after nearly every
    operator, and the next operator waits until the system has filled new pages with zeros: up to half of the time of an
    eager fp32 step on CPUs. The price is memory: the process keeps its peak until it ends. What was allocated before is
    not affected. `nasfast` commands call this when they start, unless the environment has NASFAST_KEEP_MEMORY=0.

    Args:
        keep: False restores glibc's own values and gives back what is free.

    Returns:
        whether the C library is a glibc that did so; with another one nothing changes.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        done = all([libc.mallopt(option, value) for option, value in (_KEPT if keep else _GIVEN_BACK).items()])
        if not keep:
            libc.malloc_trim(0)
    except (OSError, AttributeError):
        return False
    return done
