"""Modelled times of chains on GPUs: which schedule of the CUDA kernels is the fastest.

cuda_times.json has forward and backward of the chains of a `mobilenet_v2` step (batch 32, bfloat16), by the instruction
model of machine code and not measured. Another chain is decided as the most similar
one of them. If none has the same kinds of stages, nothing is known, and no output is computed again. Imports no torch.
"""

import json
import math
from pathlib import Path
from typing import Literal, NamedTuple, get_args

# Where the CUDA kernels have the output of an expansion: kept for backward; stored by forward, and computed again by
# backward; or computed again by both.
Schedule = Literal["stored", "released", "recomputed"]

# compute capabilities of GPUs with HBM, which move about three times as many bytes per instruction as the others
_WITH_HBM = {(8, 0), (9, 0), (10, 0), (10, 3)}
# images of the modelled step
BATCH = 32
# The most microseconds that may be given for a megabyte that is not kept from forward to backward: about what it takes
# on an H200 to write it and to read it twice.
_MOST_FOR_A_MEGABYTE = 0.6
_FILE = Path(__file__).with_name("cuda_times.json")


class Chain(NamedTuple):
    """What decides about a chain.

    Attributes:
        stages: what kind of convolution each stage has, and its kernel and stride.
        pixels: of the chain's input, of all images.
        channels: of the input, and of the output of each stage.
    """

    stages: tuple[tuple[str, int, int], ...]
    pixels: int
    channels: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        for (kind, kernel, stride), before, after in zip(
            self.stages, self.channels[:-1], self.channels[1:], strict=True
        ):
            size = f" {kernel}x{kernel}" if kernel > 1 else ""
            parts.append(f"{kind}{size}{f' stride {stride}' if stride > 1 else ''} {before}-{after}")
        return f"{', '.join(parts)} on {self.pixels} pixels"


class Times(NamedTuple):
    """Microseconds of forward and backward together in each Schedule; None where the kernels cannot."""

    stored: float
    recomputed: float | None = None
    released: float | None = None

    def schedule(self, chain: Chain) -> Schedule:
        """The fastest schedule, where a megabyte that is kept counts as `_MOST_FOR_A_MEGABYTE`."""
        costs = {name: time for name, time in self._asdict().items() if time is not None}
        # by how much the output of the first stage is larger than the input, in 16 bits
        kept_bytes = 2 * chain.pixels * (chain.channels[1] - chain.channels[0])
        costs["stored"] += _MOST_FOR_A_MEGABYTE * kept_bytes / 1e6
        return min(get_args(Schedule), key=lambda name: costs.get(name, math.inf))


def _read() -> dict[str, dict[Chain, Times]]:
    return {
        gpu: {
            Chain(tuple(tuple(stage) for stage in row["stages"]), row["pixels"], tuple(row["channels"])): Times(
                *map(row.get, Times._fields)
            )
            for row in rows
        }
        for gpu, rows in json.loads(_FILE.read_text(encoding="utf-8")).items()
    }


TIMES = _read()


def similar_gpu(capability: tuple[int, int]) -> str:
    """The modelled GPU that is most similar to one of this compute capability."""
    return "H200" if capability in _WITH_HBM else "RTX 3080"


def schedule(gpu: str, chain: Chain) -> Schedule:
    """The schedule of the CUDA kernels for a chain whose expansion they can compute again.

    It is that of the modelled chain with the same kinds of stages whose kernels, sizes and channels are most similar.
    """
    kinds = [kind for kind, *_ in chain.stages]
    found = [other for other in TIMES[gpu] if [kind for kind, *_ in other.stages] == kinds]
    same = [other for other in found if other.stages == chain.stages]
    similar = min(same or found, key=lambda other: _distance(chain, other), default=None)
    return "stored" if similar is None else TIMES[gpu][similar].schedule(similar)


def _distance(a: Chain, b: Chain) -> float:
    """By how much two chains with the same kinds of stages differ in size: the product of all ratios."""
    distance = 1.0
    for x, y in ((a.pixels, b.pixels), *zip(a.channels, b.channels, strict=True)):
        distance *= max(x, y) / min(x, y)
    return distance


def summary(gpu: str) -> str:
    """What the model decides for this GPU: a line for people."""
    schedules = {chain: times.schedule(chain) for chain, times in TIMES[gpu].items()}
    again = [schedules[chain] for chain, times in TIMES[gpu].items() if times.recomputed is not None]
    took = sum(getattr(TIMES[gpu][chain], chosen) for chain, chosen in schedules.items())
    return (
        f"cuda by the model of an {gpu}: {took:.0f} us for the {len(schedules)} chains of a mobilenet_v2 step; of the "
        f"{len(again)} expansions that it can compute again, {again.count('recomputed')} are, and "
        f"{again.count('released')} in backward only"
    )
