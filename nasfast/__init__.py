"""nasfast: fast, fair, weight-frozen neural architecture search.

Names are imported when first used, so that `nasfast.search` and `nasfast.spaces` work without importing torch, and
`nasfast.fuse` without the packages of the search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nasfast import extensions

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nasfast import data, ops, retrain, search, shrink, spaces, supernet, train
    from nasfast.fusion import fuse, unfuse
    from nasfast.indicators.bn_gamma import score
    from nasfast.indicators.rank import rank
    from nasfast.indicators.table import IndicatorTable
    from nasfast.ops import orthogonalize_, use_backend
    from nasfast.pipeline.stages import run
    from nasfast.retrain import classify, load_model
    from nasfast.runtime.memory import keep_freed_memory
    from nasfast.search import search_table
    from nasfast.settings import RunConfig
    from nasfast.supernet import Choice, Supernet, build, inherit
    from nasfast.train import train_supernet

_MODULES = (
    "data",
    "ops",
    "retrain",
    "search",
    "shrink",
    "spaces",
    "supernet",
    "train",
)
_HOMES = {
    "Choice": "nasfast.supernet",
    "IndicatorTable": "nasfast.indicators.table",
    "RunConfig": "nasfast.settings",
    "Supernet": "nasfast.supernet",
    "build": "nasfast.supernet",
    "classify": "nasfast.retrain",
    "fuse": "nasfast.fusion",
    "inherit": "nasfast.supernet",
    "keep_freed_memory": "nasfast.runtime.memory",
    "load_model": "nasfast.retrain",
    "orthogonalize_": "nasfast.ops",
    "rank": "nasfast.indicators.rank",
    "run": "nasfast.pipeline.stages",
    "score": "nasfast.indicators.bn_gamma",
    "search_table": "nasfast.search",
    "train_supernet": "nasfast.train",
    "unfuse": "nasfast.fusion",
    "use_backend": "nasfast.ops",
}

__all__ = [
    "Choice",
    "IndicatorTable",
    "RunConfig",
    "Supernet",
    "__version__",
    "build",
    "classify",
    "data",
    "fuse",
    "inherit",
    "keep_freed_memory",
    "load_model",
    "ops",
    "orthogonalize_",
    "rank",
    "retrain",
    "run",
    "score",
    "search",
    "search_table",
    "shrink",
    "spaces",
    "supernet",
    "train",
    "train_supernet",
    "unfuse",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return extensions.load(f"nasfast.{name}")
    if name in _HOMES:
        return extensions.load(f"{_HOMES[name]}:{name}")
    raise AttributeError(f"module 'nasfast' has no attribute {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
