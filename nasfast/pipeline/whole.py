"""All stages of a run in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nasfast.display import Tabular
from nasfast.pipeline.check import check_one_process
from nasfast.pipeline.networks import retrain_best
from nasfast.pipeline.searching import search
from nasfast.pipeline.stage import stage
from nasfast.pipeline.stages import score, supernet
from nasfast.retrain import RetrainResult
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.progress import Callback, calling
from nasfast.search import Candidate
from nasfast.settings import RunConfig, TaskSettings
from nasfast.spaces import format_arch


@dataclass(frozen=True, repr=False)
class RunResult(Tabular):
    """The results of a whole run.

    Attributes:
        candidates: the best architectures, best first; empty on ranks other than 0.
        retrained: results of retraining by name: `best`, ..., `random`.
        report: path of report.html; None on ranks other than 0.
    """

    candidates: list[Candidate]
    retrained: dict[str, RetrainResult]
    report: Path | None

    @property
    def caption(self) -> str:
        return f"{len(self.retrained)} retrained networks; report: {self.report}"

    def records(self) -> list[dict[str, Any]]:
        """One row per retrained network."""
        return [
            {
                "network": name,
                **{key: getattr(r, key) for key in ("top1", "top5", "macs", "params", "epochs")},
                "arch": format_arch(r.arch),
            }
            for name, r in self.retrained.items()
        ]


@stage(create=True)
def run(
    cfg: RunConfig,
    *,
    resume: bool = False,
    world: World = SINGLE,
    tasks: TaskSettings | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run all stages in order, from images to a retrained network and report.html.

    Args:
        cfg: settings of the run.
        resume: whether to continue an interrupted run; complete parts are not repeated.
        world: the ranks that train together; rank 0 runs the other stages while the others wait.
        tasks: where networks are retrained; see `retrain_best`.
        callbacks: each is called with stage, step and metrics of every line of metrics.jsonl that this process writes;
            tasks have processes of their own.

    Raises:
        TypeError: `cfg` is not a RunConfig.
    """
    from nasfast.report import write_report  # imports matplotlib, which no other stage needs

    check_one_process(tasks, world.size)
    with calling(callbacks):
        supernet(cfg, resume=resume, world=world)
        candidates = []
        if world.is_main:
            score(cfg)
            candidates = search(cfg)
        retrained = retrain_best(cfg, resume=resume, world=world, tasks=tasks)
    return RunResult(candidates, retrained, write_report(cfg.run_dir) if world.is_main else None)
