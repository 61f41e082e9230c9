"""A run: each stage reads the files of the stage before from the run directory and writes its own.

supernet -> checkpoints/   score -> indicators.json   search -> archs.json   retrain -> retrain/   report -> report.html
May import every package but `cli` and `research`. Begin with `whole`, then `stages`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nasfast import extensions

if TYPE_CHECKING:
    from nasfast.pipeline.exporting import export
    from nasfast.pipeline.networks import retrain_best
    from nasfast.pipeline.searching import score_untrained, search
    from nasfast.pipeline.stages import score, supernet
    from nasfast.pipeline.whole import RunResult, run

__all__ = ["RunResult", "export", "retrain_best", "run", "score", "score_untrained", "search", "supernet"]

# a search of a saved table must not wait for torch
__getattr__ = extensions.later(
    __name__,
    {
        **dict.fromkeys(("RunResult", "run"), "nasfast.pipeline.whole"),
        "export": "nasfast.pipeline.exporting",
        "retrain_best": "nasfast.pipeline.networks",
        **dict.fromkeys(("score", "supernet"), "nasfast.pipeline.stages"),
        **dict.fromkeys(("score_untrained", "search"), "nasfast.pipeline.searching"),
    },
)
