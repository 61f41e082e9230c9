"""Old names of what has moved: they work for one more version, and warn.

`install` makes old module names importable, and `find` serves old names of a module from its `__getattr__`.
Delete an entry in the version after the one that moved it, and this file with the last of them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "nasfast.analysis.study": "nasfast.studies.isometry.measure",
    "nasfast.cells.costs": "nasfast.spaces.cell_costs",
    "nasfast.cells.space": "nasfast.spaces.cells",
    "nasfast.cells.theorems": "nasfast.studies.wiring.theorems",
    "nasfast.device": "nasfast.runtime.device",
    "nasfast.distributed": "nasfast.runtime.distributed",
    "nasfast.doctor": "nasfast.measure.doctor",
    "nasfast.files": "nasfast.runtime.files",
    "nasfast.floor": "nasfast.measure.floor",
    "nasfast.isometry": "nasfast.studies.isometry",
    "nasfast.latency": "nasfast.measure.latency",
    "nasfast.lock": "nasfast.runtime.lock",
    "nasfast.moments": "nasfast.studies.moments",
    "nasfast.profile": "nasfast.measure.profile",
    "nasfast.projection": "nasfast.measure.projection",
    "nasfast.report.isometry": "nasfast.studies.isometry.figures",
    "nasfast.report.moments": "nasfast.studies.moments.figures",
    "nasfast.report.nasi": "nasfast.studies.nasi.figures",
    "nasfast.report.study": "nasfast.studies.page",
    "nasfast.report.wiring": "nasfast.studies.wiring.figures",
    "nasfast.study": "nasfast.studies.report",
    "nasfast.termination": "nasfast.runtime.termination",
    "nasfast.timing": "nasfast.measure.timing",
    "nasfast.wiring": "nasfast.studies.wiring",
}

NAMES = {
    "nasfast.nasi": {
        name: "nasfast.studies.nasi"
        for name in (
            "NasiCompareConfig",
            "NasiQuickConfig",
            "NasiSearchConfig",
            "nasi_compare_study",
            "nasi_quick_study",
            "nasi_search_study",
        )
    }
    | {"choice_blocks_space": "nasfast.spaces.cells"},
    "nasfast.ops": {name: "nasfast.fusion" for name in ("FuseReport", "FusedChain", "NotFused", "fuse", "unfuse")},
    "nasfast.report": {
        "study_figure": "nasfast.studies.page",
        "write_isometry_page": "nasfast.studies.isometry",
        "write_study_page": "nasfast.studies.page",
    },
}
"""Names by the module that had them -> the module that has them."""


def _homes(**homes: str) -> dict[str, str]:
    return {name: f"nasfast.nasi.{module}" for module, names in homes.items() for name in names.split()}


SCATTERED = {
    "nasfast.cells.nasi": _homes(
        cells="CellMixture",
        score="gradient_norm jacobian score score_architecture squared_norms untrained",
        search=(
            "LIPSCHITZ Constraint Loader Mixture NasiConfig NasiResult Output Record check_penalty endless limits "
            "one_step penalised random_images random_labels relaxed_gates sample search slope solve"
        ),
    ),
    "nasfast.indicators.nasi": _homes(layers="LayerMixture", table="METHOD layer_arch nasi_table"),
}
"""As `NAMES`, for modules that are gone because their names went to several modules."""


def _warn(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is now {new}; the old name goes away in the next version", category=FutureWarning, stacklevel=3
    )


class _MovedModules(MetaPathFinder, Loader):
    """Gives an import of an old module name the module of the new one."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES or fullname in SCATTERED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in SCATTERED:
            # it warns when a name is asked for, and says where that is
            module, spec.loader_state = ModuleType(spec.name), spec
            module.__getattr__ = partial(find, spec.name)
            return module
        _warn(spec.name, MODULES[spec.name])
        module = importlib.import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has just written the old name's specification over the module's own
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make the old module names importable; once per process."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())


def find(module: str, name: str) -> Any:
    """What `name` of `module` has become, for the module's `__getattr__`.

    Raises:
        AttributeError: the module never had such a name.
    """
    home = {**NAMES, **SCATTERED}.get(module, {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{home}.{name}")
    return getattr(importlib.import_module(home), name)
