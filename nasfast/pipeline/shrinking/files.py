"""What the stages of `nasfast shrink` leave: weights, what was measured at a size, and records of results."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nasfast import shrink
from nasfast.indicators.table import TABLE_FILE, IndicatorTable, TableError
from nasfast.runtime.files import CheckpointError, seal, unseal, write_atomic
from nasfast.shrink import Found, Measured, Solution
from nasfast.shrink.recipe import RECIPE_FILE, WEIGHTS_FILE
from nasfast.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, storable

RESULT_FILE = "result.json"
_SOLUTIONS_FILE = "solutions.safetensors"


def weights_digest(model: nn.Module) -> str:
    """Digest of a state dict."""
    return Checkpoint(storable(dict(model.state_dict())), {}).digest


def read_record(path: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """What `write_record` wrote about the same; None if it is absent, damaged, or about something else."""
    try:
        record = unseal(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("about") == about else None


def write_record(path: Path, about: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Write a result with what it depends on, and return it as `read_record` does."""
    write_atomic(path, seal({"about": about, **result}).encode())
    return {"about": about, **result}


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors with what they depend on."""
    save_checkpoint(path, Checkpoint(tensors, {"about": about}))


def read_tensors(path: Path, about: dict[str, Any]) -> dict[str, Tensor] | None:
    """What `save_tensors` wrote about the same; None if it is absent or damaged.

    Raises:
        CheckpointError: it is about something else.
    """
    try:
        saved = load_checkpoint(path)
    except (OSError, CheckpointError):
        return None
    before = saved.state.get("about", {})
    if changed := [name for name, value in about.items() if before.get(name) != value]:
        raise CheckpointError(
            f"the {' and '.join(changed)} are others than when {path} was written: give those of that run, or choose "
            "another --out"
        )
    return saved.tensors


def save_measured(folder: Path, measured: Measured, about: dict[str, Any]) -> None:
    """Write what was measured at a size; the table comes last, so that it stands for the whole."""
    tensors: dict[str, Tensor] = {}
    for place, rows in enumerate(measured.solutions):
        for dimension, row in enumerate(rows):
            for width, solution in row.items():
                head = f"{place}/{dimension}/{width}"
                tensors[f"{head}/kept"] = solution.kept
                tensors |= {f"{head}/weight/{path}": w for path, w in solution.weights.items()}
                tensors |= {f"{head}/bias/{path}": b for path, b in solution.biases.items()}
    save_tensors(folder / _SOLUTIONS_FILE, tensors, about)
    meta = {**measured.table.meta, "about": about}
    IndicatorTable.from_rows(measured.found.space, measured.table.scores, meta).save(folder / TABLE_FILE)


def read_measured(folder: Path, found: Found, about: dict[str, Any]) -> Measured | None:
    """What `save_measured` wrote about the same; None if it is absent, damaged, or not about it."""
    try:
        table = IndicatorTable.load(folder / TABLE_FILE)
    except (OSError, TableError):
        return None
    if table.meta.get("about") != about or table.space.fingerprint != found.space.fingerprint:
        return None
    if (tensors := read_tensors(folder / _SOLUTIONS_FILE, about)) is None:
        return None
    solutions = tuple(tuple[dict[int, Solution]](dict[int, Solution]() for _ in p.dimensions) for p in found.places)
    parts: dict[tuple[int, int, int], dict[str, dict[str, Tensor]]] = {}
    kept = {}
    for name, tensor in tensors.items():
        place, dimension, width, kind, *path = name.split("/", 4)
        key = int(place), int(dimension), int(width)
        if kind == "kept":
            kept[key] = tensor
        else:
            parts.setdefault(key, {"weight": {}, "bias": {}})[kind][path[0]] = tensor
    for (place_, dimension_, width_), chosen in sorted(kept.items()):
        of = parts[place_, dimension_, width_]
        solutions[place_][dimension_][width_] = Solution(chosen, of["weight"], of["bias"])
    return Measured(found, table, solutions)


def save_network(folder: Path, model: nn.Module, recipe: shrink.Recipe | None, about: dict[str, Any]) -> None:
    """Write a network: with a recipe by `nasfast.shrink.save`, otherwise its weights alone."""
    if recipe is not None:
        shrink.save(model, recipe, folder)
    else:
        save_tensors(folder / WEIGHTS_FILE, dict(model.state_dict()), about)


def load_network(folder: Path, like: nn.Module) -> nn.Module:
    """The network that `save_network` wrote, on a copy of one of the form of the full network.

    Raises:
        FileNotFoundError, ShrinkError, CheckpointError: its files are missing or damaged.
    """
    if (folder / RECIPE_FILE).exists():
        return shrink.load(like, folder)
    model = clone(like)
    model.load_state_dict(load_checkpoint(folder / WEIGHTS_FILE).tensors)
    return model.eval()


def clone(model: nn.Module) -> nn.Module:
    """A copy, in channels_last."""
    return copy.deepcopy(model).to(memory_format=torch.channels_last)
