"""A table from latencies of whole networks that another device measured, with its error and a margin. No torch.

A device may overlap operations, or wait for memory, so that the cost of an operation depends on its neighbours. Then a
sum over layers or edges is wrong, and by how much is measured here: each architecture is predicted by a fit without it.
The values of the table contain a margin, so that a limit holds for 95 % of the architectures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.config import ConfigError
from nasfast.runtime.files import write_atomic
from nasfast.spaces import Arch, ArchSpace
from nasfast.spaces.cost_table import FORMAT

COVERED = 0.95
"""Share of the architectures whose latency shall be at most the table's sum."""

LEAST = 20
"""Fewer latencies give no margin: of n, the largest ratio covers n / (n + 1)."""

_FOLDS = 10

_MOST = 10.0
"""Largest margin of a table that is worth having."""

_PENALTY = 0.1
"""Root of the penalty on the share of a mean network's latency that a place adds to an operation."""


_SAME = ("fingerprint", "device", "runtime", "dtype", "threads", "batch")
"""What two tables must have in common before one replaces the other's file."""


@dataclass(frozen=True)
class MeasuredReport:
    """A fitted table; `content` is that of its file, which a search in a space of layers takes."""

    content: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write the file; an older one of the same space, device and batch is replaced."""
        check_replaceable(path, self.content)
        write_atomic(Path(path), (json.dumps(self.content, indent=1) + "\n").encode())

    def __str__(self) -> str:
        content, error = self.content, self.content["held_out"]
        return "\n".join(
            [
                f"{content['space']} on {content['device'] or 'a device without a name'}: {content['about']}",
                f"error on architectures that were not fitted: {error['median']:.1%} median, {error['q80']:.1%} for "
                f"80 % of them, {error['max']:.1%} at most",
                f"a limit of T ms on this table means a predicted latency of at most T / {content['margin']:.3f} ms",
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

    The fit has the least squared relative errors with non-negative values, because a cost table has no others. An entry
    is what the operation costs anywhere plus, slightly penalised, what it costs more at its place, so an entry that few
    networks have is near the others of its operation. Ten-fold
    cross-validation predicts each architecture by a fit without it. The margin is the smallest factor on these
    predictions that covers 95 % of the latencies; for a new architecture that is drawn like these the probability is at
    least as large, up to the difference between the fits (cross-conformal prediction, Vovk 2015).

    Args:
        space: the space of the architectures.
        latencies: architecture -> latency in ms, at least `LEAST` of them.
        source: name of the file, for texts.
        device, batch: what was measured on, and images per run; a search can ask for them.

    Raises:
        ConfigError: there are too few latencies, one is not positive, or the margin is above 10.
    """
    if len(latencies) < LEAST:
        raise ConfigError(f"{source}: {len(latencies)} latencies, at least {LEAST} are needed: measure more networks")
    bad = {arch: ms for arch, ms in latencies.items() if not 0 < ms < math.inf}
    if bad:
        arch, ms = next(iter(bad.items()))
        raise ConfigError(f"{source}: {len(bad)} latencies are not positive, the first is {ms} ms of {arch}")
    archs, times = list(latencies), np.array(list(latencies.values()))
    pairs = [(i, v) for i, values in enumerate(space.options) for v in values]
    labels = sorted({space.label(*pair) for pair in pairs})
    # what each entry is a sum of: the constant has none, then the operations, then the places
    terms = np.array([[space.label(*pair) == label for label in labels] for pair in pairs], dtype=float)
    terms = np.concatenate([terms, np.eye(len(pairs))], axis=1)
    chosen = np.array([[space.check(arch)[i] == v for i, v in pairs] for arch in archs], dtype=float)
    x = np.concatenate([np.ones((len(archs), 1)), chosen @ terms], axis=1)
    predicted = _predict_held_out(x, times, len(pairs))
    ratios = np.sort(times / np.maximum(predicted, 1e-9 * times))
    # covers 95 % of the architectures, with one more that stands for a new one
    margin = float(ratios[min(len(times), math.ceil(COVERED * (len(times) + 1))) - 1])
    margin *= 1 + 1e-9  # sums that are exact may differ by rounding
    if margin > _MOST:
        raise ConfigError(
            f"{source}: a sum over operations misses some of {len(archs)} latencies by a factor of {margin:.3g}: "
            "measure more networks, or limit MACs instead"
        )
    fixed, *weights = margin * _fit(x, times, len(pairs))
    entries = dict(zip(pairs, map(float, terms @ weights), strict=True))
    error = relative_errors(predicted, times)
    about = (
        f"{source}, upper values: {COVERED:.0%} of networks take at most the table's sum, which is {margin:.3f} times "
        f"an additive fit with a median error of {error['median']:.1%}"
    )
    return MeasuredReport(
        {
            "format": FORMAT,
            "quantity": "latency",
            "unit": "ms",
            "space": space.name,
            "fingerprint": space.fingerprint,
            "device": device,
            "batch": batch,
            "about": about,
            "margin": margin,
            "fixed": float(fixed),
            "entries": [
                {"layer": i, "choice": v, "label": space.label(i, v), "value": value}
                for (i, v), value in entries.items()
            ],
            "held_out": error,
        }
    )


def _predict_held_out(x: np.ndarray, times: np.ndarray, places: int) -> np.ndarray:
    """Each time by a fit without those of its fold."""
    folds = np.random.default_rng(0).permutation(len(times)) % _FOLDS
    predicted = np.empty_like(times)
    for fold in range(_FOLDS):
        test = folds == fold
        predicted[test] = x[test] @ _fit(x[~test], times[~test], places)
    return predicted


def _fit(x: np.ndarray, times: np.ndarray, places: int) -> np.ndarray:
    """Non-negative weights of least squared relative error; those of the last columns, the places, are penalised."""
    pull = np.zeros((places, x.shape[1]))
    pull[:, -places:] = np.eye(places) * _PENALTY / times.mean()
    from scipy.optimize import nnls  # half a second

    return nnls(np.concatenate([x / times[:, None], pull]), np.append(np.ones(len(times)), np.zeros(places)))[0]


def check_replaceable(path: str | Path, head: Mapping[str, Any]) -> None:
    """Refuse to replace a table of another space, device, runtime, dtype, number of threads or batch."""
    if not Path(path).exists():
        return
    try:
        old = json.loads(Path(path).read_text(encoding="utf-8"))
        space = old["space"]
        # a table that is fitted to another device's latencies has no runtime, dtype and threads
        changes = [f"{key} {old.get(key)!r}, not {head.get(key)!r}" for key in _SAME if old.get(key) != head.get(key)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} exists and is no table of latencies: choose another --out") from error
    if changes:
        raise ConfigError(f"{path} is a table of {space!r} with {', '.join(changes)}: choose another --out")


def relative_errors(predicted: np.ndarray, times: np.ndarray) -> dict[str, float]:
    """Quantiles of the relative errors of predicted times, and their median with its sign."""
    signed = predicted / times - 1
    median, q80, most = np.quantile(np.abs(signed), (0.5, 0.8, 1))
    return {"median": float(median), "q80": float(q80), "max": float(most), "bias": float(np.median(signed))}
