"""Whether the C library keeps the memory that is freed, instead of giving it back to the system."""

from __future__ import annotations

import ctypes

# options of mallopt (malloc.h)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_KEPT = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28}
# any of these options ends glibc's own adaption of its thresholds, so they get the values at which that ends
_GIVEN_BACK = {_MMAP_MAX: 65_536, _TRIM_THRESHOLD: 2**26, _TOP_PAD: 2**17, _MMAP_THRESHOLD: 2**25}

_kept = False


def keep_freed_memory(keep: bool = True) -> bool:
    """Let glibc keep the pages of memory that is freed, for the next tensor.

    By default glibc gives blocks of more than about 32 MB back to the system when they are freed. PyTorch frees one
    after nearly every operator, and the next operator waits until the system has filled new pages with zeros: up to
    half of the time of an eager fp32 step on CPUs, and nothing where all tensors are smaller. The price is memory: the
    process keeps its peak until it ends. What was allocated before is not affected. `nasfast` commands call this when
    they start, unless the environment has NASFAST_KEEP_MEMORY=0.

    Args:
        keep: False lets glibc give large blocks back, and gives back what is free.

    Returns:
        whether malloc is that of a glibc, which did so; with another allocator nothing changes.
    """
    global _kept
    try:
        libc = ctypes.CDLL("libc.so.6")
        used, own = (ctypes.cast(library.malloc, ctypes.c_void_p).value for library in (ctypes.CDLL(None), libc))
        if used != own:
            return False  # an allocator is preloaded
        done = all([libc.mallopt(option, value) for option, value in (_KEPT if keep else _GIVEN_BACK).items()])
        if not keep:
            libc.malloc_trim(0)
    except (OSError, AttributeError):
        return False
    _kept = keep and done
    return done


def freed_memory() -> str:
    """What happens to freed memory, for the provenance of measurements: `kept`, or `as the allocator does`."""
    return "kept" if _kept else "as the allocator does"
