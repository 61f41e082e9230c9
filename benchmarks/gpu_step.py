"""How long a training step takes on a GPU: a formula whose constants are fitted to the launches of a measured step.

    python -m benchmarks.gpu_step [ROWS] [--bytes 6.3] [--products 3.1]

A launch of a CUDA kernel of chains takes

    us = fixed + bytes / bandwidth + products / rate of its family

and what lies between the launches (graphs, loss, update, Python) is a constant, the measured step without its kernels.
`bytes` are those of the tensors that a launch reads and writes, each once. `products` are its multiplications by
weights, and those of an expansion that it computes again. Families of one launch have its time. Least squares, in
microseconds.

The rows are those that `benchmarks/gpu.sh` writes. It prints the fit by family, with predictions of each chain by the
constants of all others, and the step: as measured, as the package runs it now, which computes no expansion again, and
on another GPU that takes `--bytes` and `--products` times as long for these and as long for all else. Of the last two
nothing was measured. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROWS = Path(__file__).with_name("results") / "gpu_h200.jsonl"
ENGINE = "nasfast engine"
# An RTX 3080 by an H200: 4.8 by 0.76 TB/s; and by how much the fastest family, at 182 TFLOP/s, is above the 59.5 of its
# tensor cores. By multiprocessors and clocks alone, products would take 2.25 times as long.
RTX_3080 = (6.3, 3.1)


class Launch(NamedTuple):
    """A launch of a CUDA kernel of chains.

    Attributes:
        family: template of the kernel, such as PointwiseForward.
        chain: number of its chain in the step.
        bytes, products: see above.
        us: measured; NaN where it was not.
    """

    family: str
    chain: int
    bytes: float
    products: float
    us: float = float("nan")


@dataclass(frozen=True)
class Measured:
    """A step that was measured.

    Attributes:
        launches: in order.
        stored: those in the place of `RECOMPUTING` ones where every output of a convolution is kept, as it is now.
        outside: microseconds of the step in which none of them ran.
        step: median of the step in a process without a profiler, in microseconds, which no constant is fitted to.
    """

    launches: list[Launch]
    stored: list[Launch]
    outside: float
    step: float

    @property
    def now(self) -> list[Launch]:
        """The launches of the step in which nothing is computed again, in order."""
        stored = {chain: iter([each for each in self.stored if each.chain == chain]) for chain in self.chains}
        return [next(stored[each.chain]) if each.family in RECOMPUTING else each for each in self.launches]

    @property
    def chains(self) -> list[int]:
        """The chains with an expansion that was computed again."""
        return sorted({each.chain for each in self.stored})


# families that compute an expansion again in backward
RECOMPUTING = ("ExpandBackwardKernel", "ExpansionGradientKernel")


@dataclass(frozen=True)
class Constants:
    """What launches take, in microseconds.

    Attributes:
        fixed: of each launch.
        byte: of each byte.
        product: of each product, by family.
        alone: of a launch, for families that the step launches once.
    """

    fixed: float
    byte: float
    product: dict[str, float]
    alone: dict[str, float]

    def microseconds(self, launch: Launch) -> float:
        """The time of a launch.

        Raises:
            KeyError: nothing was measured of its family.
        """
        if launch.family in self.alone:
            return self.alone[launch.family]
        return self.fixed + self.byte * launch.bytes + self.product[launch.family] * launch.products


def read(path: Path) -> Measured:
    """The step of a file of rows.

    Raises:
        ValueError: it has no launches with sizes, or no time of the step.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    launches: dict[str, list[Launch]] = {"launch_of_step": [], "launch_if_stored": []}
    for row in rows:
        if row["kind"] in launches and "bytes" in row:
            fields = (row[name] for name in ("kernel", "chain", "bytes", "products"))
            launches[row["kind"]].append(Launch(*fields, row.get("us", float("nan"))))
    whole = [row["all_us"] - row["us"] for row in rows if row["kind"] == "launches" and "all_us" in row]
    step = [1e3 * row["median_ms"] for row in rows if row["kind"] == "step" and row["name"] == ENGINE]
    if not (launches["launch_of_step"] and whole and step):
        raise ValueError(f"{path} has no launches with bytes, or no step of the engine: give rows of benchmarks/gpu.sh")
    return Measured(launches["launch_of_step"], launches["launch_if_stored"], whole[-1], step[-1])


def fit(launches: Sequence[Launch]) -> Constants:
    """The constants with the least sum of squared errors."""
    counts = Counter(launch.family for launch in launches)
    many = [launch for launch in launches if counts[launch.family] > 1]
    families = sorted({launch.family for launch in many})
    columns = [
        [1, launch.bytes, *(launch.products * (launch.family == family) for family in families)] for launch in many
    ]
    # columns of about one size, so that the rank is found right
    matrix = np.array(columns, float)
    scale = matrix.max(0)
    solved, *_ = np.linalg.lstsq(matrix / scale, np.array([launch.us for launch in many]), rcond=None)
    fixed, byte, *product = (solved / scale).tolist()
    alone = {launch.family: launch.us for launch in launches if counts[launch.family] == 1}
    return Constants(fixed, byte, dict(zip(families, product, strict=True)), alone)


def held_out(launches: Sequence[Launch]) -> list[float]:
    """The time of each launch by constants that are fitted to all other chains; its own time for a family of one."""
    chains = {launch.chain for launch in launches}
    constants = {chain: fit([launch for launch in launches if launch.chain != chain]) for chain in chains}
    counts = Counter(launch.family for launch in launches)
    return [
        launch.us if counts[launch.family] == 1 else constants[launch.chain].microseconds(launch) for launch in launches
    ]


def by_family(launches: Sequence[Launch], times: Iterable[float]) -> dict[str, float]:
    """Sums of the times of the launches of each family."""
    sums: dict[str, float] = {}
    for launch, us in zip(launches, times, strict=True):
        sums[launch.family] = sums.get(launch.family, 0.0) + us
    return sums


def scaled(constants: Constants, *, bytes: float, products: float) -> Constants:
    """The constants of a GPU that takes so many times as long for bytes and for products; a dense stem has bytes."""
    product = {family: products * us for family, us in constants.product.items()}
    alone = {family: bytes * us for family, us in constants.alone.items()}
    return replace(constants, byte=bytes * constants.byte, product=product, alone=alone)


class Schedules(NamedTuple):
    """Microseconds of the launches that recompute, measured; of those in their place; and a deviation of the latter."""

    recomputed: float
    stored: float
    deviation: float


def schedules(measured: Measured, chain: int) -> Schedules:
    """What a chain takes with an expansion that backward computes again, and if it is stored."""
    constants, out = fit(measured.launches), held_out(measured.launches)
    errors: dict[str, list[float]] = {}
    for launch, guess in zip(measured.launches, out, strict=True):
        errors.setdefault(launch.family, []).append((guess / launch.us - 1) ** 2)
    recomputed = [launch for launch in measured.launches if launch.chain == chain and launch.family in RECOMPUTING]
    stored = [launch for launch in measured.stored if launch.chain == chain]
    deviations = [statistics.fmean(errors[each.family]) ** 0.5 * constants.microseconds(each) for each in stored]
    return Schedules(
        sum(launch.us for launch in recomputed), sum(map(constants.microseconds, stored)), math.hypot(*deviations)
    )


def table(measured: Measured) -> list[str]:
    """The fit, in lines for people."""
    launches, constants = measured.launches, fit(measured.launches)
    us = by_family(launches, [launch.us for launch in launches])
    fitted, out = by_family(launches, map(constants.microseconds, launches)), by_family(launches, held_out(launches))
    counts = Counter(launch.family for launch in launches)
    lines = ["| family | launches | measured us | fitted | error | held out |", "|---|---|---|---|---|---|"]
    for family in sorted(us, key=lambda name: -us[name]):
        errors = [f"{100 * (sums[family] / us[family] - 1):+.1f} %" for sums in (fitted, out)]
        errors = errors if counts[family] > 1 else ["alone", "alone"]
        cells = [family, str(counts[family]), f"{us[family]:.0f}", f"{fitted[family]:.0f}", *errors]
        lines.append(f"| {' | '.join(cells)} |")
    total, whole = sum(fitted.values()), sum(fitted.values()) + measured.outside
    rates = ", ".join(f"{family} {2e-6 / each:.0f}" for family, each in constants.product.items())
    lines += [
        "",
        f"fixed {constants.fixed:.1f} us; {1e-6 / constants.byte:.1f} TB/s; TFLOP/s: {rates}",
        f"launches {total:.0f} us (held out {sum(out.values()):.0f}, measured {sum(us.values()):.0f}); "
        f"outside {measured.outside:.0f}; step {whole / 1e3:.2f} ms, measured {measured.step / 1e3:.2f}",
    ]
    for chain in measured.chains:
        backward = schedules(measured, chain)
        lines.append(
            f"chain {chain}: backward of the expansion {backward.recomputed:.0f} us where it is computed again, and "
            f"{backward.stored:.0f} +- {backward.deviation:.0f} by the formula if it is stored"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_step", description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS)
    parser.add_argument("--bytes", type=float, default=RTX_3080[0], help="of another GPU: times as long for a byte")
    parser.add_argument("--products", type=float, default=RTX_3080[1], help="times as long for a product")
    args = parser.parse_args()
    measured = read(args.rows)
    print("\n".join(table(measured)))
    constants = fit(measured.launches)
    other = scaled(constants, bytes=args.bytes, products=args.products)
    for name, each in (("here", constants), ("another GPU", other)):
        then, now = (
            (sum(map(each.microseconds, launches)) + measured.outside) / 1e3
            for launches in (measured.launches, measured.now)
        )
        print(f"{name}, by the formula: {then:.2f} ms as measured, {now:.2f} ms where nothing is computed again")


if __name__ == "__main__":
    main()
