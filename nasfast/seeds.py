"""Seeds: how one seed of a run gives every random stream a seed of its own, and the numbers of the streams.

`derive_seed(seed, STREAM, ...)` is the seed of a stream. Streams of different programs may share a number, because no
run mixes them. Every published figure depends on these numbers: never change one, and give a new stream a new number.
No torch.
"""

from __future__ import annotations

import hashlib

# what training images draw (`nasfast.data.augment`), followed by the epoch and the place in it; their windows have
# no stream of their own, and draw from (seed, epoch)
AUTO_AUGMENT = 1

# what `nasfast.research.cells.prototypes` draws
PROTOTYPES = 0
"""The fields that the images of a class are cut from."""
PROTOTYPE_SPLITS = 1, 2
"""Labels, windows and noise of the training images, and of the test images."""

# what a differentiable search of cells draws (`nasfast.research.cells.search`)
CELL_LOGITS = 1
CELL_GATES = 2
"""Followed by the step and by what the gates are drawn for."""
FOR_LOGITS, FOR_WEIGHTS = 0, 1
"""What the gates of a step are drawn for: the held-out batch that logits learn from, or the training batch."""

# what a search with NASI draws (`nasfast.research.nasi.search`); each is followed by the step
NASI_GATES = 1
NASI_LABELS = 2
NASI_IMAGES = 3

# what the NASI study draws
STUDY_TRAINED_WEIGHTS = 7
"""Initial weights of the cells that are trained."""
STUDY_CELLS = 8
"""Random cells."""
STUDY_BATCHES = 9
"""Batches that score an architecture."""
STUDY_LABELS = 10
"""Random labels of these batches, followed by the batch."""
STUDY_IMAGES = 11
"""Random images of these batches, followed by the batch."""
STUDY_SEARCH_BATCHES = 12
"""Batches of a search."""
STUDY_EXACT_WEIGHTS = 13
"""Initial weights of the cells whose exact trace is computed."""
STUDY_DIRECTIONS = 14
"""Random directions that the closed form is compared with."""
STUDY_PICKS = 15
"""Architectures that are scored one by one."""


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits from a few integers; unlike `hash`, the same in every Python.

    Args:
        parts: plain integers: a seed, then a stream, then whatever tells its uses apart, such as a step.
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1
