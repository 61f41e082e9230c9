"""A run: its settings, resolved; its directory, locked; what the stages before left there, checked. No torch.

`Run.open` resolves, locks and tracks, and compares config.yaml where a run goes on, once for a command. Stages are
functions of an open Run; each first reads what it is about (`inputs`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nasfast.config import ConfigError, difference, load_yaml
from nasfast.indicators.registry import configured_score
from nasfast.indicators.table import TABLE_FILE, IndicatorTable, TableError
from nasfast.runtime.arguments import check_type
from nasfast.runtime.files import CheckpointError, write_atomic
from nasfast.runtime.lock import holds_lock, run_lock
from nasfast.runtime.progress import duration
from nasfast.runtime.tracking import tracked
from nasfast.settings import (
    CONFIG_FILE,
    MACHINE,
    RESUMED,
    SPACE_FILE,
    SUPERNET,
    DataConfig,
    RunConfig,
    TaskSettings,
    TrainConfig,
)
from nasfast.spaces import SearchSpace

if TYPE_CHECKING:
    from nasfast.runtime.distributed import World

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Run:
    """The settings and the directory of a run.

    `open` gives the run that a command works on, `look` one to look at.

    Attributes:
        cfg: the settings, resolved: they have no null or `auto` that a result depends on.
        ranks: those that work together; None for one process. The leading one locks the directory, rank 0 reads and
            writes it.
        tasks: where each network is retrained in a process of its own; None for this process.
        is_open: whether stages may write, within the block of `open`.
    """

    cfg: RunConfig
    ranks: World | None = None
    tasks: TaskSettings | None = None
    is_open: bool = False

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        cfg: RunConfig,
        *,
        begins: bool = False,
        threads: bool = True,
        world: World | None = None,
        tasks: TaskSettings | None = None,
    ) -> Iterator[Run]:
        """Within this block, a run is locked, its settings are checked and in use, and its metrics are tracked.

        Args:
            cfg: the settings; all ranks take those of rank 0, whose files others may not see.
            begins: whether the first stage may begin the run: it makes the directory, and compares settings itself.
                Otherwise they must be those of config.yaml.
            threads: whether to set the threads of torch, for which it is imported.
            world: the ranks; see `Run`.
            tasks: see `Run`.

        Raises:
            TypeError: `cfg` is no RunConfig.
            ConfigError: there are both tasks and several ranks, or the settings cannot be used.
            RunDirectoryError: another process has the lock, or the directory cannot be written.
            CheckpointError: config.yaml has other settings.
        """
        check_type("cfg", cfg, RunConfig, advice="RunConfig.load(FILE) and RunConfig.from_dict(MAPPING) make one")
        check_one_process(tasks, 1 if world is None else world.size)
        cfg = resolved(cfg)
        if world is not None and world.size > 1:
            cfg = RunConfig.from_dict(json.loads(world.broadcast_bytes(json.dumps(cfg.to_dict()).encode())))
        run = cls(cfg, world, tasks, is_open=True)
        if threads:
            from nasfast.runtime.device import use_threads  # imports torch

            use_threads(cfg.threads)
        lock = run_lock(run.dir, create=begins) if run.leads else contextlib.nullcontext()
        with lock, tracked(cfg.track, run.dir, cfg.to_dict()):
            if run.leads and not begins:
                run.check_settings(supernet=not run.needs_no_supernet)
            yield run

    @classmethod
    def look(cls, cfg: RunConfig) -> Run:
        """The run of these settings, which no stage writes; errors as in `resolved`."""
        return cls(resolved(cfg))

    # what the settings and the directory say

    @property
    def dir(self) -> Path:
        """The run directory."""
        return self.cfg.run_dir

    @property
    def world(self) -> World:
        """The ranks that work together."""
        from nasfast.runtime.distributed import SINGLE  # imports torch

        return SINGLE if self.ranks is None else self.ranks

    @property
    def leads(self) -> bool:
        """Whether this process locks the directory."""
        return self.ranks is None or self.ranks.leads

    @property
    def needs_no_supernet(self) -> bool:
        """Whether a search needs no supernet: the score knows the space alone, and none was trained."""
        scoring = self.cfg.score
        if scoring.table is not None or any((self.dir / "checkpoints").glob("supernet-*")):
            return False
        with contextlib.suppress(FileNotFoundError, TableError):
            meta = IndicatorTable.load(self.dir / TABLE_FILE).meta
            if meta.get("score") == scoring.label:
                return "step" not in meta  # that of the checkpoint; nothing is imported to know it
        return configured_score(scoring).untrained

    @property
    def nothing_is_trained(self) -> bool:
        """Whether no training has begun."""
        return not any((self.dir / name).exists() for name in ("checkpoints", "retrain"))

    # what is refused before hours of training, and before a file is replaced

    def check_open(self) -> None:
        """Refuse to run a stage while nothing keeps other processes out of the directory."""
        closed = self.leads and self.dir.is_dir() and not holds_lock(self.dir)
        if closed or not self.is_open:
            raise RuntimeError(f"a stage writes to {self.dir}: open the run, `with Run.open(cfg) as run:`")

    def check_settings(self, *, supernet: bool = True) -> None:
        """Refuse other settings than those in config.yaml, before replacing any file.

        Settings of later stages and of the machine may differ. Of a run without a supernet, so may its training and
        method, and the images are those of the first network that was trained.
        """
        path = self.dir / CONFIG_FILE
        if not path.exists():
            return
        kinds = (MACHINE, RESUMED) if supernet else (MACHINE, RESUMED, SUPERNET)
        (saved, _), (new, _) = load_settings(self.cfg.out).parted(*kinds), self.cfg.parted(*kinds)
        if not supernet and self.nothing_is_trained:
            saved["data"] = new["data"]
        refuse_changes(path, saved, new)

    def already_begun(self, what: str, check: Callable[[], None]) -> FileExistsError:
        """The error for a run directory that has `what` already; `check` raises what `--resume` would refuse."""
        head = f"{self.dir} has {what} already"
        try:
            check()
        except CheckpointError as error:
            return FileExistsError(
                f"{head}: choose another --out, or add --resume, which takes the settings of the run, and leave out "
                f"flags that give others. {error}"
            )
        return FileExistsError(f"{head}: add --resume, or choose another --out")

    # what a stage does at its beginning and end

    def save_config(self, *, search: bool = True) -> None:
        """Write the settings to config.yaml; a stage does so once it has used them, because they may be new.

        Without `search`, those of the search that are there stay: they are the run's own, and archs.json has those of a
        later search.
        """
        cfg, path = self.cfg, self.dir / CONFIG_FILE
        if not search and path.exists():
            cfg = cfg.replace(search=RunConfig.load(path).search)
        write_atomic(path, cfg.to_yaml().encode())

    def save_space(self, space: SearchSpace) -> None:
        """Write the space to space.yaml."""
        write_atomic(self.dir / SPACE_FILE, space.to_yaml().encode())


def resolved(cfg: RunConfig) -> RunConfig:
    """`cfg.resolved()`, with the number type that `precision: auto` means in both trainings.

    It is that of config.yaml in the run directory, so a run keeps what it had also where another machine goes on. Where
    that says nothing, `nasfast.ops.precision.resolve_precision` decides.

    Raises:
        ConfigError: see `RunConfig.resolved`.
    """
    cfg = cfg.resolved()
    if "auto" not in (cfg.train.precision, cfg.retrain.train.precision):
        return cfg
    from nasfast.ops.precision import resolve_precision  # imports torch

    saved = RunConfig()
    with contextlib.suppress(ConfigError):  # a stage that needs the file says what is wrong with it
        saved = RunConfig.from_dict(load_yaml(cfg.run_dir / CONFIG_FILE))

    def with_precision(train: TrainConfig, before: TrainConfig) -> TrainConfig:
        name = before.precision if train.precision == "auto" else train.precision
        return train.replace(precision=resolve_precision(name, cfg.device))

    retrain = cfg.retrain.replace(train=with_precision(cfg.retrain.train, saved.retrain.train))
    return cfg.replace(train=with_precision(cfg.train, saved.train), retrain=retrain)


def load_settings(out: str) -> RunConfig:
    """The settings that a run directory has, resolved; errors as in `resolved`, and FileNotFoundError for none."""
    path = Path(out) / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: run `nasfast supernet --out {out}` first. A score of untrained weights needs no "
            f"checkpoint, but the settings of a run in {path}"
        )
    return resolved(RunConfig.load(path).replace(out=out))


def refuse_changes(path: Path, saved: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise CheckpointError where the settings of a run that goes on are others than in its file."""
    if saved != new:
        raise CheckpointError(
            f"{path} has other settings: {difference(saved, new)}; keep those of the run, or choose another --out"
        )


def same_images(data: DataConfig, seed: int) -> DataConfig:
    """The settings of images with the seed of the run for the held-out ones, which all seeds then have."""
    return data if data.split_seed is not None else data.replace(split_seed=seed)


def check_one_process(tasks: TaskSettings | None, processes: int) -> None:
    """Refuse tasks in several processes, each of which would start all of them."""
    if tasks is not None and processes > 1:
        raise ConfigError(
            "tasks (--seeds, --executor, --workers and the like) train each network in one process, and there are "
            f"{processes} ranks, which would each start all tasks: leave tasks out, or run one process, without "
            "torchrun"
        )


def read_result(path: Path, load: Callable[[Path], Result], command: str) -> Result:
    """What a stage wrote to a file; the error for one that is missing or damaged names the command of the stage."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `{command}` first")
    try:
        return load(path)
    except (ConfigError, TableError) as error:
        raise type(error)(f"{error}: run `{command}` again") from error


def log_stage(stage: str, started: float, text: str) -> None:
    """The line of a stage that has ended; `started` is its beginning by `time.monotonic`."""
    _LOG.info("%-8s  %s, %s", stage, text, duration(time.monotonic() - started))
