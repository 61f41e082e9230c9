"""`nasfast rank --train N`: trains a sample of a run's space, and says how well scores rank the accuracies.

RUN/trained/ARCH/ has the files of one training, RUN/accuracies.json the accuracies of all that are finished, and
RUN/trained.json the comparison. Later calls add to them.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nasfast.config import ConfigBase, ConfigError
from nasfast.display import counted
from nasfast.indicators.accuracies import MIN_ARCHITECTURES, AccuracyError
from nasfast.indicators.compare import ScoreComparison, attainable_tau, compare_scores
from nasfast.indicators.learned import held_out_score
from nasfast.indicators.rank import rank
from nasfast.indicators.registry import ScoreError, all_scores
from nasfast.indicators.structure import BASELINES, structure_table
from nasfast.indicators.table import TABLE_FILE, IndicatorTable
from nasfast.pipeline.children import TASK_FILE, Task, TaskRunner, threads_for, workers_for
from nasfast.pipeline.estimate import network_timing, start_of_task
from nasfast.pipeline.evidence import (
    build_evidence,
    compute_scores,
    find_space,
    retrain_loaders,
    split_score,
    supernet_to_rank,
)
from nasfast.pipeline.inputs import Inputs
from nasfast.pipeline.networks import NETWORK, network_task
from nasfast.pipeline.run import Run, resolved
from nasfast.retrain.retrain import RESULT_FILE, RetrainResult
from nasfast.runtime.device import use_threads
from nasfast.runtime.files import write_atomic
from nasfast.runtime.lock import check_free
from nasfast.runtime.progress import duration
from nasfast.search import stratified_sample
from nasfast.settings import RetrainConfig, RunConfig, SupernetConfig, TaskSettings, TrainConfig
from nasfast.spaces import Arch, SearchSpace, arch_file_text, format_arch

ACCURACIES_FILE, REPORT_FILE, SETTINGS_FILE, FOLDER = "accuracies.json", "trained.json", "settings.yaml", "trained"

RECIPE = RetrainConfig(init="orthogonal", train=TrainConfig(epochs=1, lr=0.02, warmup_epochs=0.1, label_smoothing=0.0))
"""The short training of each architecture; `rank --train --epochs` changes the number of epochs."""

BATCH_SIZE = 32

IMAGES: dict[str, Any] = {"batch_size": BATCH_SIZE, "augment": "none", "workers": 0}
"""Settings of `data` for it: in so few epochs small batches give more steps, and the network cannot memorise the
images. The trainings run side by side, so each decodes its images itself."""

_RESULT_KEYS = ("top1", "top5", "loss", "macs", "params", "epochs", "images")
"""What accuracies.json has of a result."""

LEARNED = "learned"
"""Name of the row of what the accuracies teach."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleSettings(ConfigBase):
    """RUN/trained/settings.yaml: what all trainings of a sample share; their bytes depend on the number of threads."""

    epochs: int
    threads: int


def sample_inputs(cfg: RunConfig) -> Inputs:
    """What a sample is of: the space in the run directory, or that of the settings, and the limits of the search."""
    return Inputs.of(cfg, find_space(cfg))


def train_sample(
    run: Run, inputs: Inputs, count: int, *, epochs: int | None = None, settings: TaskSettings = TaskSettings()
) -> dict[Arch, float]:
    """Train a sample of the space until `count` architectures have an accuracy; writes accuracies.json.

    The sample is within the limits of the search and stratified by MACs (`nasfast.search.stratified_sample`). Each
    architecture is trained by `RECIPE` and `IMAGES` on the training images that remain when
    `data.val_fraction` of them are held out. The held-out images give its accuracy, so that a search which uses the
    accuracies never sees `data.val`. Trainings that an earlier call finished count, and those that it began continue;
    `epochs` of None takes theirs, or those of `RECIPE`.

    Returns:
        Architecture -> accuracy in percent, of all that are finished and within the limits of the search.
        accuracies.json also has those that were trained under wider limits.
    """
    run.check_open()
    tasks = plan_sample(run.cfg, inputs, count, epochs=epochs)
    folder = run.dir / FOLDER
    with TaskRunner(folder, settings) as runner:
        write_atomic(folder / SETTINGS_FILE, _load_settings(run.cfg, count, epochs).to_yaml().encode())
        results = runner.run(tasks)
        done = {tuple(t.arguments["arch"]): r.result for t, r in zip(tasks, results, strict=True) if r.status == "done"}
        if len(done) < len(tasks):
            _LOG.warning("%d of %d architectures are trained: the same command continues", len(done), len(tasks))
        space, limits = inputs.space, inputs.limits
        within = {a: 100 * result["top1"] for a, result in done.items() if limits.admits(space.cost(a), a)}
        if len(within) < MIN_ARCHITECTURES:
            raise AccuracyError(
                f"{len(within)} of {len(tasks)} architectures are trained, at least {MIN_ARCHITECTURES} are needed to "
                f"compare rankings: the same command continues; {folder} has the logs"
            )
        entries = {
            format_arch(a): {"accuracy": 100 * result["top1"], **{key: result[key] for key in _RESULT_KEYS}}
            for a, result in done.items()
        }
        write_atomic(run.dir / ACCURACIES_FILE, (json.dumps(entries, indent=1) + "\n").encode())
    return within


def plan_sample(cfg: RunConfig, inputs: Inputs, count: int, *, epochs: int | None = None) -> list[Task]:
    """The trainings of `train_sample`: those of the sample, then those of earlier calls that are not in it."""
    if count < MIN_ARCHITECTURES:
        raise AccuracyError(
            f"--train {count}: at least {MIN_ARCHITECTURES} architectures are needed to compare rankings"
        )
    space = inputs.space
    archs = stratified_sample(space, count, limits=inputs.limits, seed=cfg.seed)
    # a folder is named after its architecture
    finished = [space.parse(path.parent.name) for path in _list_finished(cfg)]
    cfg = _make_config(cfg, _load_settings(cfg, count, epochs))
    _check_images(cfg, space, count)
    names = {arch_file_text(arch): arch for arch in [*archs, *finished]}
    return [network_task(cfg, name, space, arch, seed=cfg.seed, hold_out=True) for name, arch in names.items()]


def estimate_sample(
    cfg: RunConfig, inputs: Inputs, count: int, settings: TaskSettings, *, epochs: int | None = None
) -> str:
    """What `train_sample` would do, with the time from a few steps of the middle architecture; none is trained."""
    tasks = plan_sample(cfg, inputs, count, epochs=epochs)
    done = {path.parent.name for path in _list_finished(cfg)}
    missing = [task for task in tasks if task.name not in done]
    if not missing:
        return f"all {len(tasks)} architectures are trained"
    space = inputs.space
    macs = {task.name: space.cost(task.arguments["arch"]).macs for task in missing}
    middle = sorted(missing, key=lambda task: macs[task.name])[len(missing) // 2]
    at_a_time = settings.workers or workers_for(len(missing), threads=middle.threads, gpus=middle.gpus)
    check_free(cfg.run_dir)  # steps are timed without the lock
    start = start_of_task().seconds
    _LOG.info("timing a few steps of the middle one of %d architectures", len(missing))
    cfg = resolved(_make_config(cfg, _load_settings(cfg, count, epochs)))
    use_threads(cfg.threads)
    epochs = cfg.retrain.train.epochs
    one = network_timing(cfg, space, tuple(middle.arguments["arch"]), hold_out=True).seconds
    total = (one * sum(macs.values()) / macs[middle.name] + start * len(missing)) / at_a_time
    images = len(retrain_loaders(cfg, space, hold_out=True)[0].source)
    return (
        f"{counted(len(missing), 'training')} of {counted(epochs, 'epoch')} on {counted(images, 'image')}, {len(done)} "
        "more are finished; "
        f"{at_a_time} at a time with {middle.threads} threads each: about {duration(one)} for one, {duration(total)} "
        "for all, if nothing else uses the cores. Nothing was trained."
    )


def compare_trained(
    cfg: RunConfig,
    space: SearchSpace,
    accuracies: Mapping[Arch, float],
    *,
    names: Sequence[str] = (),
    half_width: float = 0.1,
    resamples: int = 1000,
) -> ScoreComparison:
    """Rank a trained sample by the run's table, by scores and by baselines; writes trained.json and rank.json.

    `learned` is what the accuracies themselves teach, starting from the table or `sqrt_size`; each architecture is
    predicted without its own accuracy. Each of the scores `names` is computed for each architecture; none takes every
    registered score that is no baseline.
    `half_width` and `resamples` are those of `compare_scores`.
    """
    table, refused = cfg.run_dir / TABLE_FILE, {}
    scores: dict[str, IndicatorTable | Mapping[Arch, float]] = {}
    if table.exists():
        scores[TABLE_FILE] = loaded = IndicatorTable.load(table)
        rank(accuracies, loaded, space, resamples=resamples, seed=cfg.seed).save(cfg.run_dir / "rank.json")
    for name in names or [name for name in all_scores() if name not in BASELINES]:
        try:
            scores[name] = compute_scores(cfg, space, name, accuracies)
        except (ScoreError, ConfigError, FileNotFoundError) as error:
            refused[name] = str(error)
    prior = scores.get(TABLE_FILE, structure_table(space, "sqrt_size"))
    priors = {arch: prior.score(arch) if isinstance(prior, IndicatorTable) else prior[arch] for arch in accuracies}
    try:
        scores[LEARNED] = held_out_score(space, accuracies, priors, seed=cfg.seed)
    except ModuleNotFoundError as error:
        refused[LEARNED] = str(error)
    comparison = compare_scores(
        accuracies,
        scores,
        space,
        half_width=half_width,
        refused=refused,
        attainable=_attainable_tau(cfg.run_dir, accuracies),
        resamples=resamples,
        seed=cfg.seed,
    )
    comparison.save(cfg.run_dir / REPORT_FILE)
    return comparison


def _attainable_tau(run_dir: Path, archs: Iterable[Arch]) -> float | None:
    """See `attainable_tau`; None unless all trainings have a record of the same number of held-out images."""
    paths = [run_dir / FOLDER / arch_file_text(arch) / "retrain" / NETWORK / RESULT_FILE for arch in archs]
    try:
        results = [RetrainResult.load(path) for path in paths]
    except ConfigError:  # a file is absent or damaged, and nothing else needs it
        return None
    if len({result.images for result in results}) > 1:
        return None
    return attainable_tau(np.stack([result.right for result in results]))


def check_names(cfg: RunConfig, space: SearchSpace, names: Sequence[str]) -> None:
    """Refuse scores that `compare_trained` could not compute, before hours of training."""
    # of each kind one is loaded, because nothing is computed that could change it
    supernet = functools.cache(functools.partial(supernet_to_rank, cfg, space))
    for score in [score for name in names for score in split_score(name)]:
        build_evidence(cfg, supernet(trained=score.trained), score)


def _make_config(cfg: RunConfig, shared: SampleSettings) -> RunConfig:
    """The settings of a run that matter for its sample; the others, such as limits, may change between calls."""
    train = RECIPE.train.replace(epochs=shared.epochs, eval_every=shared.epochs)
    return RunConfig(
        out=cfg.out,
        seed=cfg.seed,
        device=cfg.torch_device,
        threads=shared.threads,
        data=cfg.data.replace(**IMAGES),
        supernet=SupernetConfig(activation=cfg.supernet.activation),
        retrain=RECIPE.replace(train=train),
    )


def _list_finished(cfg: RunConfig) -> list[Path]:
    """task.json of every finished training."""
    return sorted((cfg.run_dir / FOLDER).glob(f"*/{TASK_FILE}"))


def _load_settings(cfg: RunConfig, count: int, epochs: int | None) -> SampleSettings:
    """The settings that the first call saved, or those that it will save."""
    path = cfg.run_dir / FOLDER / SETTINGS_FILE
    if not path.exists():
        return SampleSettings(epochs or RECIPE.train.epochs, cfg.threads or threads_for(count))
    saved = SampleSettings.load(path)
    if epochs not in (None, saved.epochs):
        raise ConfigError(
            f"{path.parent} has trainings of {saved.epochs} epochs, --epochs is {epochs}: their accuracies cannot be "
            f"compared; leave --epochs away, or delete {path.parent} to train all of them again"
        )
    return saved


def _check_images(cfg: RunConfig, space: SearchSpace, count: int) -> None:
    """Refuse images that cannot tell `count` architectures apart, or see `retrain_loaders`."""
    train, held = retrain_loaders(cfg, space, hold_out=True)
    if len(held.source) < count:
        raise AccuracyError(
            f"--train {count}: {len(held.source)} held-out images give at most {len(held.source) + 1} different "
            f"accuracies, which cannot order {count} architectures: give more images, a larger data.val_fraction, or "
            "fewer architectures"
        )
    if len(train.source) < BATCH_SIZE:
        raise AccuracyError(
            f"--train {count}: {len(train.source)} training images are less than one batch of {BATCH_SIZE}: "
            "give more images"
        )
