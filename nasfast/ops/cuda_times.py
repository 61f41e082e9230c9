"""Modelled times of chains on GPUs: where the CUDA kernels are faster than Triton's, and which of their schedules is.

cuda_times.json has forward and backward of the chains of a `mobilenet_v2` step (batch 32, bfloat16), by the instruction
model and not measured. `python -m benchmarks.gpu_model.cuda_times` writes it. Another chain is decided as the most
similar one of them. If none has the same kinds of stages, nothing is known: the chain runs on the CUDA kernels, and no
output is computed again. Imports no torch.
"""

import json
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

    @property
    def expansion_bytes(self) -> int:
        """By how much the output of the first stage is larger than the input, in 16 bits."""
        return 2 * self.pixels * (self.channels[1] - self.channels[0])

    def __str__(self) -> str:
        parts = []
        for (kind, kernel, stride), before, after in zip(
            self.stages, self.channels[:-1], self.channels[1:], strict=True
        ):
            size = f" {kernel}x{kernel}" if kernel > 1 else ""
            parts.append(f"{kind}{size}{f' stride {stride}' if stride > 1 else ''} {before}-{after}")
        return f"{', '.join(parts)} on {self.pixels} pixels"


class Times(NamedTuple):
    """Microseconds of forward and backward together.

    Attributes:
        triton: with the Triton kernels.
        stored, recomputed, released: with the CUDA kernels in each Schedule; None where they cannot.
    """

    triton: float
    stored: float
    recomputed: float | None = None
    released: float | None = None

    def cuda(self, schedule: Schedule) -> float:
        """The time in this schedule, or with everything stored if the kernels have no other."""
        time: float | None = getattr(self, schedule)
        return self.stored if time is None else time

    def schedule(self, chain: Chain) -> Schedule:
        """The fastest schedule, where a megabyte that is kept counts as `_MOST_FOR_A_MEGABYTE`."""
        known: list[Schedule] = [name for name in get_args(Schedule) if getattr(self, name) is not None]
        kept = {"stored": chain.expansion_bytes, "released": 0, "recomputed": 0}
        return min(known, key=lambda name: self.cuda(name) + _MOST_FOR_A_MEGABYTE * kept[name] / 1e6)


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


def most_similar(gpu: str, chain: Chain) -> Chain | None:
    """The modelled chain with the same kinds of stages whose kernels, sizes and channels are most similar."""
    kinds = [kind for kind, *_ in chain.stages]
    found = [other for other in TIMES[gpu] if [kind for kind, *_ in other.stages] == kinds]
    same = [other for other in found if other.stages == chain.stages]
    return min(same or found, key=lambda other: _distance(chain, other), default=None)


def _distance(a: Chain, b: Chain) -> float:
    """By how much two chains with the same kinds of stages differ in size: the product of all ratios."""
    distance = 1.0
    for x, y in ((a.pixels, b.pixels), *zip(a.channels, b.channels, strict=True)):
        distance *= max(x, y) / min(x, y)
    return distance


def schedule(gpu: str, chain: Chain) -> Schedule:
    """The schedule of the CUDA kernels for a chain whose expansion they can compute again."""
    similar = most_similar(gpu, chain)
    return "stored" if similar is None else TIMES[gpu][similar].schedule(similar)


def slower(gpu: str, chain: Chain, schedule: Schedule) -> str:
    """Why Triton's kernels run this chain faster than the CUDA kernels in this schedule; empty if they do not."""
    similar = most_similar(gpu, chain)
    if similar is None:
        return ""
    times = TIMES[gpu][similar]
    cuda = times.cuda(schedule)
    if cuda <= times.triton:
        return ""
    which = similar if similar == chain else f"the modelled chain that is most similar: {similar}"
    return f"by the model of an {gpu}, {cuda:.0f} us, and {times.triton:.0f} us with triton, for {which}"


def summary(gpu: str) -> list[str]:
    """What the model decides for this GPU: lines for people."""
    times = TIMES[gpu]
    schedules = {chain: t.schedule(chain) for chain, t in times.items()}
    again = [schedules[chain] for chain, t in times.items() if t.recomputed is not None]
    reasons = [why for chain, chosen in schedules.items() if (why := slower(gpu, chain, chosen))]
    took = sum(t.cuda(schedules[chain]) for chain, t in times.items())
    return [
        f"cuda by the model of an {gpu}: {took:.0f} us, and {sum(t.triton for t in times.values()):.0f} us with "
        f"triton, for the {len(times)} chains of a mobilenet_v2 step; of the {len(again)} expansions that it can "
        f"compute again, {again.count('recomputed')} are, and {again.count('released')} in backward only",
        *(f"not cuda {reason}" for reason in reasons),
    ]
