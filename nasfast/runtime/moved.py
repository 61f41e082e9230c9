"""Old names of what has moved: they work for one more version, and warn.

`install` makes old module names importable, and `find` serves old names of a module from its `__getattr__`.
Delete an entry in the version after the one that moved it, and this file with the last of them.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "nasfast.analysis.study": "nasfast.studies.isometry.measure",
    "nasfast.cells.costs": "nasfast.spaces.cell_costs",
    "nasfast.cells.theorems": "nasfast.studies.wiring.theorems",
    "nasfast.commands": "nasfast.cli.commands",
    "nasfast.device": "nasfast.runtime.device",
    "nasfast.distributed": "nasfast.runtime.distributed",
    "nasfast.doctor": "nasfast.measure.doctor",
    "nasfast.files": "nasfast.runtime.files",
    "nasfast.floor": "nasfast.measure.floor",
    "nasfast.isometry": "nasfast.studies.isometry",
    "nasfast.lock": "nasfast.runtime.lock",
    "nasfast.moments": "nasfast.studies.moments",
    "nasfast.profile": "nasfast.measure.profile",
    "nasfast.projection": "nasfast.measure.projection",
    "nasfast.report.isometry": "nasfast.studies.isometry.figures",
    "nasfast.report.moments": "nasfast.studies.moments.figures",
    "nasfast.report.nasi": "nasfast.studies.nasi.figures",
    "nasfast.report.study": "nasfast.studies.page",
    "nasfast.report.wiring": "nasfast.studies.wiring.figures",
    "nasfast.termination": "nasfast.runtime.termination",
    "nasfast.timing": "nasfast.measure.timing",
    "nasfast.wiring": "nasfast.studies.wiring",
}


def _by_name(tables: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """{old module: {new module: names, separated by spaces}} -> {old module: {name: new module}}."""
    return {
        old: {name: home for home, names in homes.items() for name in names.split()} for old, homes in tables.items()
    }


NAMES = _by_name(
    {
        "nasfast.cells": {"nasfast.spaces:BUILDERS": "CELL_SPACES"},
        "nasfast.data.datasets": {"nasfast.data.digits": "DigitsSource"},
        "nasfast.measure.latency": {
            "nasfast.measure.step_times": "PUBLISHED PUBLISHED_MS",
            "nasfast.measure.step_times:StepTimesRow": "LatencyRow",
        },
        "nasfast.measure.projection": {"nasfast.measure.cards": "CARDS get_card"},
        "nasfast.measure.timing": {"nasfast.measure.config": "StepConfig"},
        "nasfast.nasi": {
            "nasfast.spaces.cells": "choice_blocks_space",
            "nasfast.studies.nasi": (
                "NasiCompareConfig NasiQuickConfig NasiSearchConfig "
                "nasi_compare_study nasi_quick_study nasi_search_study"
            ),
        },
        "nasfast.ops": {"nasfast.fusion": "FuseReport FusedChain NotFused fuse unfuse"},
        "nasfast.report": {
            "nasfast.studies.isometry": "write_isometry_page",
            "nasfast.studies.page": "study_figure write_study_page",
        },
        "nasfast.settings": {
            "nasfast.stages.checks": "check_same_run check_scoring check_search",
            # not SpaceConfig: jsonargparse looks that name up here for every help, which would then warn
            "nasfast.settings.run": "RunConfig",
        },
        "nasfast.spaces.arch": {"nasfast.spaces": "ArchSpace arch_from_json arch_to_json load_arch"},
        "nasfast.spaces.builders": {"nasfast.spaces": "BUILDERS get_space names_file"},
        "nasfast.spaces.cost": {"nasfast.spaces.blocks": "BlockCost block_cost check_kind cost_of shuffle_branches"},
        "nasfast.spaces.space": {"nasfast.spaces": "from_yaml"},
        "nasfast.train.config": {"nasfast.settings.train": "TrainConfig"},
        "nasfast.train.supernet": {"nasfast.settings.supernet": "METHODS Method MethodName"},
    }
)
"""Names by the module that had them -> the module that has them; `module:name` where the name is another one too."""

SCATTERED = _by_name(
    {
        "nasfast.cells.nasi": {
            "nasfast.nasi.cells": "CellMixture",
            "nasfast.nasi.config": "Constraint NasiConfig check_penalty",
            "nasfast.nasi.score": "gradient_norm jacobian score score_architecture squared_norms untrained",
            "nasfast.nasi.search": (
                "LIPSCHITZ Loader Mixture NasiResult Output Record Sampled endless limits one_step penalised "
                "random_images random_labels relaxed_gates sample search slope solve"
            ),
        },
        "nasfast.cells.space": {
            "nasfast.spaces": "read_space space_kind",
            "nasfast.spaces:BUILDERS": "CELL_SPACES",
            "nasfast.spaces.cells": (
                "CELLS Cell CellSpace DARTS_OPS Edge NAS_BENCH_201_OPS Norm Order darts_cell darts_space minimal_cell "
                "modified_cell nas_bench_201_cell nas_bench_201_space simplified_cell"
            ),
        },
        "nasfast.indicators.nasi": {
            "nasfast.nasi.layers": "LayerMixture",
            "nasfast.nasi.table": "METHOD layer_arch nasi_table",
        },
        "nasfast.ops.fuse": {"nasfast.fusion": "FuseReport FusedChain NotFused fuse unfuse"},
        "nasfast.study": {
            "nasfast.settings.checks": "check_common",
            "nasfast.studies.inputs": "maker sample_shape",
            "nasfast.studies.parts": "Check Table plain",
            "nasfast.studies.report": "StudyReport",
            "nasfast.studies.run": "Task carry_out progress run_study",
        },
    }
)
"""As `NAMES`, for modules that are gone because their names went to several modules.

`nasfast.ops.fuse`, whose names went to one module, is here because it was a function of `nasfast.ops` as well.
"""


def _warn(old: str, new: str, level: int) -> None:
    # Python hides a DeprecationWarning in imported modules, so the author of one would not see it
    warnings.warn(
        f"{old} is now {new}; the old name goes away in the next version", FutureWarning, stacklevel=level + 1
    )


class _ScatteredModule(ModuleType):
    """Stands for a module that is gone. It warns when a name is asked for, and says where that is."""

    def __getattr__(self, name: str) -> Any:
        return find(self.__name__, name, level=3)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        # importing `nasfast.ops.fuse` binds that name to the module, and `nasfast.ops.fuse(model)` must still work
        package, _, name = self.__name__.rpartition(".")
        return find(package, name, level=3)(*arguments, **keywords)


class _MovedModules(MetaPathFinder, Loader):
    """Gives an import of an old module name the module of the new one."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MODULES or fullname in SCATTERED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name in SCATTERED:
            spec.loader_state = spec
            return _ScatteredModule(spec.name)
        _warn(spec.name, MODULES[spec.name], level=2)
        module = importlib.import_module(MODULES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has just written the old name's specification over the module's own
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make the old module names importable; once per process."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())


def find(module: str, name: str, *, level: int = 2) -> Any:
    """What `name` of `module` has become, for the module's `__getattr__`.

    Args:
        module: a key of `NAMES` or `SCATTERED`.
        name: one of its names.
        level: `stacklevel` of the warning, as if this function called `warnings.warn`.

    Raises:
        AttributeError: the module never had such a name.
    """
    home = {**NAMES, **SCATTERED}.get(module, {}).get(name)
    if home is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, renamed = home.partition(":")
    _warn(f"{module}.{name}", f"{home}.{renamed or name}", level)
    return getattr(importlib.import_module(home), renamed or name)
