"""Readers of the files that `rank` compares: trained accuracies, and scores. They need no torch.

A JSON file maps each architecture to an accuracy, to a list of accuracies of several runs (their mean is taken), or to
a mapping that has one of these under a name such as `mean_acc` (the form that NAS-Bench-Macro publishes). A CSV file
has the header `arch,accuracy` and one line per architecture. An architecture is written as on the command line
(`0 1 2`), as digits (`012`), or, in a space of cells, with the names of its operations as in NAS-Bench-201
(`|conv_3x3~0|+|none~0|skip_connect~1|`). docs/ranking_zero_cost.md has examples.
"""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from nasfast.config import nearest, unique_keys
from nasfast.spaces import Arch, ArchError, ArchSpace

MIN_ARCHITECTURES = 10
"""Smallest number to compare. Even for 10 architectures in random order, tau is beyond +-0.47 once in 20 times."""

_FORM = 'give JSON such as {"0 1 2": 71.3}, or CSV with a header such as arch,accuracy'
_LARGEST = 100
# Names of the accuracy of an architecture in published files, in order of preference.
_ACCURACY_KEYS = ("mean_acc", "accuracy", "acc", "test_acc", "val_acc")


class AccuracyError(ValueError):
    """A file of accuracies or scores cannot be used; the text names the entry and what was expected."""


def top1_interval(top1: float, images: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a top-1, from 0 to 1, over the images, without the scatter of another training."""
    from scipy import stats  # half a second, which only cards and reports need

    interval = stats.binomtest(round(top1 * images), images).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def read_accuracies(path: str | Path, space: ArchSpace, *, column: str | None = None) -> dict[Arch, float]:
    """Trained accuracies of architectures, in the unit of the file: percent, or a share of 1.

    A file is CSV if its name ends with `.csv`, otherwise JSON. `column` is the accuracy of entries that have several;
    None takes the first of mean_acc, accuracy, acc, test_acc, val_acc.
    """
    names = _ACCURACY_KEYS if column is None else (column,)
    accuracies, unusable = {}, []
    entries = _read_entries(path, space)
    for key, arch, entry in entries:
        try:
            accuracies[arch] = _accuracy(entry, names)
        except AccuracyError as error:
            unusable.append(f"entry {key!r}: {error}")
    if unusable:
        raise AccuracyError(
            f"{path}: {len(unusable)} of {len(entries)} architectures have no accuracy from 0 to 100; the first, "
            f"{unusable[0]}. Correct or delete these entries, or give another column"
        )
    if len(accuracies) < MIN_ARCHITECTURES:
        raise AccuracyError(
            f"{path} has {len(accuracies)} architectures, at least {MIN_ARCHITECTURES} are needed to compare rankings: "
            "train more architectures, or use a published table"
        )
    return accuracies


def read_scores(path: str | Path, space: ArchSpace, *, column: str = "score") -> dict[Arch, float]:
    """Numbers of architectures, such as the scores of a predictor.

    JSON maps an architecture to a number, or to a mapping that has one as `column`; CSV has a header with arch and
    `column`.
    """
    scores = {}
    for key, arch, entry in _read_entries(path, space):
        if isinstance(entry, dict) and column not in entry:
            raise AccuracyError(f"{path}: {key!r} has no {column!r}; {nearest(column, entry)}")
        value = entry[column] if isinstance(entry, dict) else entry
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise AccuracyError(f"{path}: {column} of {key!r} must be a finite number, got {value!r}")
        scores[arch] = float(value)
    return scores


def _read_entries(path: str | Path, space: ArchSpace) -> list[tuple[str, Arch, Any]]:
    """(key, architecture, entry) of each entry, in the order of the file."""
    is_csv = Path(path).suffix.lower() == ".csv"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # tables of Excel begin with a byte order mark
        items = _csv_entries(text, path) if is_csv else _json_entries(text, path)
    except OSError as error:
        raise AccuracyError(f"cannot read {path} ({error.strerror}): {_FORM}") from error
    except UnicodeDecodeError as error:
        raise AccuracyError(f"{path} is not {'CSV' if is_csv else 'JSON'} ({error}): {_FORM}") from error
    entries: dict[Arch, tuple[str, Arch, Any]] = {}
    foreign, repeated = [], []
    for key, entry in items:
        try:
            arch = space.parse(key)
        except ArchError as error:
            foreign.append(f"entry {key!r}: {error}")
            continue
        if arch in entries:
            repeated.append(f"{entries[arch][0]!r} and {key!r} are the same architecture")
        else:
            entries[arch] = key, arch, entry
    if foreign:
        raise AccuracyError(
            f"{path}: {len(foreign)} of {len(items)} architectures are not of space {space.name!r}; the first, "
            f"{foreign[0]}. Give the space of the file, or delete these entries"
        )
    if repeated:
        raise AccuracyError(
            f"{path}: {len(repeated)} of {len(items)} entries repeat an architecture; the first, {repeated[0]}: "
            "keep one"
        )
    return list(entries.values())


def _json_entries(text: str, path: str | Path) -> list[tuple[str, Any]]:
    try:
        pairs = json.loads(text, object_pairs_hook=tuple)  # a dict would lose keys that are there twice
    except ValueError as error:
        raise AccuracyError(f"{path} is not JSON ({error}): {_FORM}") from error
    if not isinstance(pairs, tuple) or not pairs:
        kind = "no entry" if pairs == () else f"a {type(pairs).__name__}"
        raise AccuracyError(f"{path} has {kind}, not accuracies of architectures: {_FORM}")
    try:
        return [(key, unique_keys(list(entry)) if isinstance(entry, tuple) else entry) for key, entry in pairs]
    except ValueError as error:
        raise AccuracyError(f"{path}: {error}") from error


def _csv_entries(text: str, path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """(architecture, mapping of the other columns) of each line; numbers become floats."""
    reader = csv.DictReader(io.StringIO(text))
    columns = reader.fieldnames or []
    if "arch" not in columns or len(columns) < 2:
        raise AccuracyError(
            f"{path} has the header {','.join(columns)!r}: begin it with one such as arch,accuracy or arch,score"
        )
    entries = []
    for line in reader:
        if None in line or None in line.values():
            raise AccuracyError(f"{path}, line {reader.line_num}: expected {len(columns)} values ({','.join(columns)})")
        entries.append((line["arch"], {name: _number(line[name]) for name in columns if name != "arch"}))
    if not entries:
        raise AccuracyError(f"{path} has only its header: add a line for each architecture")
    return entries


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _accuracy(entry: Any, names: tuple[str, ...]) -> float:
    """The accuracy of an entry; the mean if it has several runs."""
    value = entry
    if isinstance(entry, dict):
        name = next((name for name in names if name in entry), None)
        if name is None:
            raise AccuracyError(f"no accuracy; expected one of {', '.join(names)}, got {', '.join(entry)}")
        value = entry[name]
    runs = value if isinstance(value, list) else [value]
    if not runs or any(isinstance(r, bool) or not isinstance(r, (int, float)) or not math.isfinite(r) for r in runs):
        raise AccuracyError(f"accuracy must be a number or a list of numbers, got {value!r}")
    if any(not 0 <= r <= _LARGEST for r in runs):
        raise AccuracyError(f"accuracy must be from 0 to 100 (percent) or to 1, got {value!r}")
    return math.fsum(runs) / len(runs)
