"""What the registries import when it is used, by name: scores of the core, and all that `nasfast.research` adds.

An entry is a module, or `module:attribute`. The core imports nothing of `nasfast.research` in another way.
"""

from __future__ import annotations

import importlib
from typing import Any

SPACES = {
    "darts": "nasfast.research.cells.space:darts_space",
    "nas_bench_201": "nasfast.research.cells.space:nas_bench_201_space",
    "transnas_micro": "nasfast.research.cells.space:transnas_micro_space",
    "choice_blocks": "nasfast.research.cells.space:choice_blocks_space",
}
"""Built-in name of a search space -> its builder."""

SPACE_KINDS = {"cell": "nasfast.research.cells.space:CellSpace"}
"""Key of the written form of a kind of space -> its class."""

CORE_SCORES = {
    "gamma": "nasfast.indicators.bn_gamma",
    "isometry": "nasfast.indicators.isometry",
    **dict.fromkeys(("path_loss", "path_accuracy", "recalibrated_accuracy"), "nasfast.indicators.paths"),
}
"""Name of a score of the core that needs torch -> the module that registers it."""

SCORES = dict.fromkeys(
    ("synflow", "naswot", "ntk_q", "jacov", "vkdnw", "nasi", "expressivity", "progressivity", "trainability"),
    "nasfast.research.scores",
)
"""Name of a score -> the module that registers it."""

CELL_SCORE = "jacov+synflow+expressivity+progressivity-ntk_q+depth"
"""The score of cells that needs no training, of networks of `CELL_SIZE`."""

CELL_SIZE = {"cells": 5, "channels": 8}

BENCHMARK_SCORES = "nasfast.research.scores:BENCHMARK_SCORES"
"""The scores that `nasfast rank --benchmark` compares where none are given."""

COMMANDS = {
    "isometry": "what orthogonal and Gaussian weights do to signals in a space, beside the paper's claims",
    "moments": "quick | figures | paths: signal and noise with depth, well behaved or pathological at initialisation",
    "wiring": "theorems | p1 | p2 | p3 | cost: what differentiable search does to the topology of cells, and why",
    "nasi": "quick | search: architectures chosen at initialisation by the kernel's trace norm",
}
"""Name of a command -> its line in `nasfast --help`."""

COMMAND_FLAGS = "nasfast.research.studies.commands:flags"
COMMAND_RUN = "nasfast.research.studies.commands:run"
"""The functions of these commands; `nasfast.cli` calls them as it calls those of its own commands."""


_LEARN_PACKAGE = "sklearn"
"""What the extra `learn` installs."""

_SEARCH_PACKAGES = "PIL jsonargparse matplotlib rich safetensors scipy torchvision yaml".split()
"""Packages that the extra `search` installs; `fuse` and the operators need none of them."""


def load(entry: str) -> Any:
    """Import what an entry names; the error for a missing package names the extra that has it."""
    name, _, attribute = entry.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(explain_missing(error, name), name=error.name) from error
    return getattr(module, attribute) if attribute else module


def explain_missing(error: ModuleNotFoundError, who: str) -> str:
    """The text of the error for a package that `who` needs, with the extra that has it, if one has."""
    package = (error.name or "").partition(".")[0]
    if "pip install" in str(error) or package not in (*_SEARCH_PACKAGES, _LEARN_PACKAGE):
        return str(error)
    if package == _LEARN_PACKAGE:
        return "learning from trained accuracies needs scikit-learn: pip install 'nasfast[learn]'"
    return f"{who} needs {error.name}, which comes with the search: pip install 'nasfast[search]'"
