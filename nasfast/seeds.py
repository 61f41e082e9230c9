"""Seeds: how one seed of a run gives every random stream a seed of its own, and the numbers of the streams.

`derive_seed(seed, STREAM, ...)` is the seed of a stream. Streams of different programs may share a number, because no
run mixes them; a stream that one module draws is named there. Every published figure depends on these numbers: never
change one, and give a new stream a new number. No torch.
"""

from __future__ import annotations

import hashlib

# what training images draw (`nasfast.data.augment`), followed by the epoch and the place in it; their windows have
# no stream of their own, and draw from (seed, epoch)
AUTO_AUGMENT = 1


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits from a few integers; unlike `hash`, the same in every Python.

    Args:
        parts: plain integers: a seed, then a stream, then whatever tells its uses apart, such as a step.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
