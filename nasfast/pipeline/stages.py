"""The stages that train or load a supernet, and the whole run: files in, files out.

supernet -> checkpoints/   score -> indicators.json
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nasfast.config import ConfigError, difference
from nasfast.display import Tabular, counted
from nasfast.indicators.registry import configured_score, gives_table
from nasfast.indicators.scores import score_table
from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.measure.doctor import environment
from nasfast.pipeline.evidence import check_scoring, image_loaders, load_evidence, open_inputs
from nasfast.pipeline.finished import read_finished, save_finished
from nasfast.pipeline.inputs import read_inputs, read_layers
from nasfast.pipeline.networks import retrain_best
from nasfast.pipeline.path_scores import open_path_scores
from nasfast.pipeline.run import Run, log_stage
from nasfast.pipeline.searching import search
from nasfast.report.findings import at_chance, training_top1
from nasfast.retrain import RetrainResult
from nasfast.runtime.distributed import SINGLE, World
from nasfast.runtime.files import CheckpointError, read_metrics, write_atomic
from nasfast.runtime.once import log_once
from nasfast.runtime.progress import Callback, calling
from nasfast.runtime.termination import Terminated
from nasfast.search import Candidate
from nasfast.settings import CONFIG_FILE, SPACE_FILE, RunConfig, TaskSettings
from nasfast.spaces import SearchSpace, format_arch, read_cost_table
from nasfast.train.checkpoint import CheckpointFolder
from nasfast.train.supernet import make_supernet, train_supernet

_LOG = logging.getLogger(__name__)


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
        tasks: where each network is retrained in a process of its own, with the same bytes; None for this process.
        callbacks: each is called with stage, step and metrics of every line of metrics.jsonl that this process writes;
            tasks have processes of their own.

    Raises:
        TypeError: `cfg` is not a RunConfig.
    """
    with Run.open(cfg, begins=True, world=world, tasks=tasks) as open_run, calling(callbacks):
        return every_stage(open_run, resume=resume)


def every_stage(run: Run, *, resume: bool = False) -> RunResult:
    """As `run`; what stops it has the stage in its text."""
    from nasfast.report.html import write_report  # imports matplotlib, which no other stage needs

    stage, candidates = "supernet", []
    # ranks that begin together look at the files of every stage
    if resume and run.world.size == 1 and (finished := read_finished(run.cfg)) is not None:
        _LOG.info("%s has ended, and its files are as it left them: nothing is left to do", run.dir)
        return RunResult(*finished, run.dir / "report.html")
    if resume and run.world.is_main and not (run.dir / CONFIG_FILE).exists():
        _say_it_begins(run.dir)  # before the images are read: the directory may be misspelt
    try:
        supernet(run, resume=resume)
        if run.world.is_main:
            stage = "score"
            score(run, resume=resume)
            stage = "search"
            candidates = search(run)
        stage = "retrain"
        retrained = retrain_best(run, resume=resume)
    except Terminated as stopped:
        stopped.reason += f" in the stage `{stage}`"
        raise
    except KeyboardInterrupt as stopped:
        raise KeyboardInterrupt(f"in the stage `{stage}`") from stopped
    if not run.world.is_main:
        return RunResult(candidates, retrained, None)
    report = write_report(run.dir)
    save_finished(run.dir, retrained)
    return RunResult(candidates, retrained, report)


def supernet(run: Run, *, resume: bool = False) -> Path:
    """Train the supernet; writes config.yaml, space.yaml, environment.json, metrics and checkpoints/.

    With `resume`, or where torchrun starts the run again, it continues from the newest good checkpoint. It returns the
    path of the final one.

    Raises:
        ConfigError, DataError: the settings or images cannot be used.
        TrainingDivergedError, CheckpointError, FileExistsError, Terminated, RankError: see `nasfast.train.train`.
    """
    run.check_open()
    started, cfg, world = time.monotonic(), run.cfg, run.world
    inputs, images = open_inputs(cfg)
    space = inputs.space
    loader, _ = image_loaders(cfg, space, world=world, images=images)
    net, sampler = make_supernet(space, cfg.method, cfg.supernet, seed=cfg.seed)
    check_scoring(cfg, net, configured_score(cfg.score))
    if world.is_main:
        _prepare(run, space, resume=resume)
    for sentence in inputs.limits.met_by_all(space):
        _LOG.warning("%s", sentence)
    _LOG.info("%s: %d layers, %.3g architectures", space.name, len(space), space.cardinality)
    _LOG.info("%s", net.summary.words)
    _LOG.debug("%s", net.summary)
    torch.manual_seed(cfg.seed)  # checkpoints have the state of the global generator
    final = train_supernet(
        net, loader, sampler, cfg.train, run_dir=run.dir, resume=resume, device=cfg.torch_device, world=world
    )
    if world.is_main:
        log_stage("supernet", started, f"{counted(cfg.train.epochs, 'epoch')}{_describe_accuracy(run.dir, space)}")
    return final


def _prepare(run: Run, space: SearchSpace, *, resume: bool) -> None:
    """Check that the run directory can be used, and write the config, the space and the environment."""
    folder = CheckpointFolder(run.dir / "checkpoints", "supernet")
    resume = resume or run.world.has_begun(folder.stem)
    if folder.paths():
        if not resume:
            raise run.already_begun("a supernet run", lambda: _check_continues(run, space, folder))
        _check_continues(run, space, folder)
    elif resume:
        _say_it_begins(run.dir)
    run.save_config()
    run.save_space(space)
    write_atomic(run.dir / "environment.json", (json.dumps(environment(), indent=1) + "\n").encode())


def _say_it_begins(run_dir: Path) -> None:
    log_once(_LOG, logging.WARNING, f"nothing to resume in {run_dir}: starting from the beginning")


def _check_continues(run: Run, space: SearchSpace, folder: CheckpointFolder) -> None:
    """Refuse to resume with another space or other settings than those of the run directory."""
    try:
        saved = read_layers(run.dir)
    except (FileNotFoundError, ConfigError) as error:
        # checkpoints have the fingerprint of their space, so they can be compared instead
        folder.latest(fingerprint=space.fingerprint)
        _LOG.warning("%s", error)
    else:
        if saved.fingerprint != space.fingerprint:
            changes = difference(saved.to_dict(), space.to_dict())
            raise CheckpointError(
                f"{run.dir / SPACE_FILE} differs from the space of this run: {changes}; "
                "resume with the same space and images, or choose another --out"
            )
    run.check_settings()


def _describe_accuracy(run_dir: Path, space: SearchSpace) -> str:
    """How accurate the supernet's paths are; a warning says if it has learnt nothing, for its scores are unproven."""
    top1, classes = training_top1(read_metrics(run_dir)), space.num_classes
    if top1 is None:
        return ""
    if at_chance(top1, classes):
        _LOG.warning(
            "the supernet's training accuracy is at chance (%.1f %%, %d classes): its scores may rank nothing. "
            "Compare with `nasfast rank` or the random baseline, or let more parameters train (supernet.trainable)",
            100 * top1,
            classes,
        )
    return f", top-1 {top1:.1%} of paths"


def score(run: Run, *, resume: bool = False) -> IndicatorTable | None:
    """Write indicators.json, and return its table.

    It is None for scores of whole paths that are not distilled, because the search computes those. Scores of paths are
    kept in path_scores.jsonl while nothing changes that they depend on, so one that was stopped continues. With
    `resume`, so does one that had ended, which is scored again otherwise.

    Raises:
        FileNotFoundError, CheckpointError: see `load_supernet`.
        ConfigError, ScoreError, TableError: the supernet cannot have this score, the score is not finite, or the user's
            table cannot be used.
    """
    run.check_open()
    started, cfg, settings, inputs = time.monotonic(), run.cfg, run.cfg.score, read_inputs(run.cfg)
    if not gives_table(settings):
        _LOG.info("%s scores whole paths during the search: no table is written", settings.name)
        return None
    meta: dict[str, Any] = {"settings": cfg.score_settings}
    if settings.table is not None:
        costs = read_cost_table(settings.table, inputs.space)
        table = IndicatorTable.from_costs(inputs.space, costs, {"score": settings.label, **meta})
    else:
        evidence, checkpoint = load_evidence(cfg, inputs.space)
        meta = {"method": cfg.method, "seed": cfg.seed, "step": checkpoint.state["step"], **meta}
        keeping: dict[str, Any] = {}
        scoring = configured_score(settings)
        if not scoring.additive:
            record = open_path_scores(cfg, scoring, evidence, checkpoint, resume=resume)
            keeping = {"known": dict(record.scores), "keep": record.add}
            if record.scores:
                _LOG.info("%s: %d paths are scored already, and kept", record.path, len(record.scores))
        table = score_table(settings.label, evidence, structure=settings.structure or 0.0, meta=meta, **keeping)
    table.save(run.dir / TABLE_FILE)
    run.save_config()
    log_stage("score", started, settings.words)
    return table
