"""A table from latencies of whole networks that another device measured, with its error and a margin. No torch.

A device may overlap operations, or wait for memory, so that what an operation costs depends on its neighbours. Then a
sum over layers or edges is wrong, and by how much is measured here: each architecture is predicted by a fit that did not
see it. The values of the table contain a margin, so that a limit holds for 95 % of the architectures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from nasfast.config import ConfigError
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace
from nasfast.spaces.cost_table import FORMAT

COVERED = 0.95
"""Share of the architectures whose latency shall be at most the table's sum."""

LEAST = 20
"""Fewer latencies give no margin: of n, the largest ratio covers n / (n + 1)."""

_FOLDS = 10


@dataclass(frozen=True)
class MeasuredReport:
    """A fitted table; `form` is the content of its file, which a search in a space of layers takes."""

    form: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write the file."""
        write_atomic(Path(path), (json.dumps(self.form, indent=1) + "\n").encode())

    def __str__(self) -> str:
        error = self.form["held_out"]
        return "\n".join(
            [
                f"{self.form['space']} on {self.form['device'] or 'a device without a name'}: {self.form['about']}",
                f"error on architectures that were not fitted: {error['median']:.1%} median, {error['q80']:.1%} for "
                f"80 % of them, {error['max']:.1%} at most",
                f"a limit of T ms on this table means a predicted latency of at most T / {self.form['margin']:.3f} ms",
            ]
        )


def fit_measured(
    space: ArchSpace,
    latencies: Mapping[Arch, float],
    *,
    source: str = "",
    device: str | None = None,
    batch: int | None = None,
) -> MeasuredReport:
    """Fit an additive table to the latencies of whole networks.

    The fit has the least squared relative errors with non-negative values, because a cost table has no others. Ten-fold
    cross-validation predicts each architecture by a fit without it. The margin is the smallest factor on these
    predictions that covers 95 % of the latencies; for a new architecture that is drawn like these the probability is at
    least as large, up to the difference between the fits (cross-conformal prediction, Vovk 2015).

    Args:
        space: the space of the architectures.
        latencies: architecture -> latency in ms, at least `LEAST` of them.
        source: name of the file, for texts.
        device, batch: what was measured on, and images per run; a search can ask for them.

    Raises:
        ConfigError: there are too few latencies, or one is not positive.
    """
    if len(latencies) < LEAST:
        raise ConfigError(f"{source}: {len(latencies)} latencies, at least {LEAST} are needed: measure more networks")
    bad = {arch: ms for arch, ms in latencies.items() if not 0 < ms < math.inf}
    if bad:
        arch, ms = next(iter(bad.items()))
        raise ConfigError(f"{source}: {len(bad)} latencies are not positive, the first is {ms} ms of {arch}")
    archs, times = list(latencies), np.array(list(latencies.values()))
    columns = {pair: n for n, pair in enumerate((i, v) for i, values in enumerate(space.options) for v in values)}
    x = np.zeros((len(archs), 1 + len(columns)))
    x[:, 0] = 1
    for row, arch in zip(x, archs, strict=True):
        row[[1 + columns[pair] for pair in enumerate(space.check(arch)) if pair in columns]] = 1
    order = np.random.default_rng(0).permutation(len(archs)) % _FOLDS
    predicted = np.empty_like(times)
    for fold in range(_FOLDS):
        test = order == fold
        predicted[test] = x[test] @ _fit(x[~test], times[~test])
    margin = _margin(times, predicted)
    values = margin * _fit(x, times)
    return MeasuredReport(_form(space, columns, values, margin, _errors(times, predicted), (source, device, batch)))


def _fit(x: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Non-negative weights of least squared relative error."""
    return nnls(x / times[:, None], np.ones(len(times)))[0]


def _margin(times: np.ndarray, predicted: np.ndarray) -> float:
    """The factor on predictions that covers 95 % of architectures, with one more that stands for a new one."""
    ratios = np.sort(times / np.maximum(predicted, 1e-9 * times))
    return float(ratios[min(len(times), math.ceil(COVERED * (len(times) + 1))) - 1])


def _errors(times: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    signed = predicted / times - 1
    median, q80, most = np.quantile(np.abs(signed), (0.5, 0.8, 1))
    return {"median": float(median), "q80": float(q80), "max": float(most), "bias": float(np.median(signed))}


def _form(
    space: ArchSpace,
    columns: Mapping[tuple[int, int], int],
    values: np.ndarray,
    margin: float,
    error: dict[str, float],
    origin: Sequence[Any],
) -> dict[str, Any]:
    source, device, batch = origin
    about = (
        f"{source}, upper values: {COVERED:.0%} of networks take at most the table's sum, which is {margin:.3f} times "
        f"an additive fit with a median error of {error['median']:.1%}"
    )
    return {
        "format": FORMAT,
        "quantity": "latency",
        "unit": "ms",
        "space": space.name,
        "fingerprint": space.fingerprint,
        "device": device,
        "batch": batch,
        "about": about,
        "margin": margin,
        "fixed": float(values[0]),
        "entries": [
            {"layer": i, "choice": v, "label": space.label(i, v), "value": float(values[1 + n])}
            for (i, v), n in columns.items()
        ],
        "held_out": error,
    }
