"""Modelled times of chains on GPUs: where the CUDA kernels are faster than Triton's, and which of their schedules is.

cuda_times.json has forward and backward of the chains of a `mobilenet_v2` step (batch 32, bfloat16), by the instruction
model and not measured. `python -m benchmarks.gpu_model.cuda_times` writes it. Another chain is decided as the most
similar one of them. If none has the same kinds of stages, nothing is known: the chain runs on the CUDA kernels, and no
output is computed again. Imports no torch.
"""

import json
from pathlib import Path
from typing import NamedTuple

# compute capabilities of GPUs with HBM, which move about three times as many bytes per instruction as the others
_WITH_HBM = {(8, 0), (9, 0), (10, 0), (10, 3)}
# images of the modelled step
BATCH = 32
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
    """Microseconds of forward and backward together.

    Attributes:
        triton: with the Triton kernels.
        stored: with the CUDA kernels, if every convolution's output is stored.
        recomputed: with the CUDA kernels, if backward computes the expansion again; None where they cannot.
    """

    triton: float
    stored: float
    recomputed: float | None

    @property
    def recomputes(self) -> bool:
        return self.cuda < self.stored

    @property
    def cuda(self) -> float:
        return self.stored if self.recomputed is None else min(self.stored, self.recomputed)


def _read() -> dict[str, dict[Chain, Times]]:
    return {
        gpu: {
            Chain(tuple(tuple(stage) for stage in row["stages"]), row["pixels"], tuple(row["channels"])): Times(
                row["triton"], row["stored"], row["recomputed"]
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


def recomputes(gpu: str, chain: Chain) -> bool:
    """Whether the CUDA kernels are faster if they compute the expansion again."""
    similar = most_similar(gpu, chain)
    return similar is not None and TIMES[gpu][similar].recomputes


def slower(gpu: str, chain: Chain, *, recompute: bool) -> str:
    """Why Triton's kernels run this chain faster than the CUDA kernels; empty if they do not.

    Args:
        recompute: whether the CUDA kernels would compute the expansion again.
    """
    similar = most_similar(gpu, chain)
    if similar is None:
        return ""
    times = TIMES[gpu][similar]
    cuda = times.recomputed if recompute and times.recomputed is not None else times.stored
    if cuda <= times.triton:
        return ""
    which = similar if similar == chain else f"the modelled chain that is most similar: {similar}"
    return f"by the model of an {gpu}, {cuda:.0f} us, and {times.triton:.0f} us with triton, for {which}"


def summary(gpu: str) -> list[str]:
    """What the model decides for this GPU: lines for people."""
    times = TIMES[gpu].values()
    again = [t for t in times if t.recomputed is not None]
    reasons = [why for chain, t in TIMES[gpu].items() if (why := slower(gpu, chain, recompute=t.recomputes))]
    return [
        f"cuda by the model of an {gpu}: {sum(t.cuda for t in times):.0f} us, and {sum(t.triton for t in times):.0f} "
        f"us with triton, for the {len(times)} chains of a mobilenet_v2 step; it computes "
        f"{sum(t.recomputes for t in again)} of the {len(again)} expansions again for which it can",
        *(f"not cuda {reason}" for reason in reasons),
    ]
