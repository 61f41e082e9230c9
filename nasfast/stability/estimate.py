"""`nasfast run --seeds N --dry_run`: the tasks, with time and memory from a few timed steps. No run begins."""

from __future__ import annotations

from nasfast.runtime.device import use_threads
from nasfast.settings import RunConfig, TaskSettings
from nasfast.stability.room import check_room
from nasfast.stability.run import check_seeds, with_threads
from nasfast.stability.work import seeds_at_a_time
from nasfast.stages.estimate import Estimate, Plan, memory, trial_of


def plan_seeds(cfg: RunConfig, seeds: int, settings: TaskSettings = TaskSettings()) -> Plan:
    """Time a few steps of each kind of task in this process.

    Raises:
        ConfigError, DataError, InfeasibleConstraintError, RunDirectoryError, CheckpointError: the run would be refused.
    """
    check_seeds(cfg, seeds)
    cfg = with_threads(cfg, seeds).resolved()
    at_a_time = settings.workers or seeds_at_a_time(cfg, seeds)
    if settings.executor == "processes":
        check_room(cfg, seeds, at_a_time)
    use_threads(cfg.threads)
    trainings = 2 * seeds + cfg.retrain.random_architectures
    with trial_of(cfg) as trial:
        scored = Estimate(
            "seeds (supernet, score, search)", seeds, trial.supernet_seconds() + trial.score_seconds(), memory()
        )
        trained = Estimate("networks (retraining)", trainings, trial.network_seconds(), memory())
        written = trial.written
    return Plan((scored, trained), cfg.threads, at_a_time, settings, written, settings.max_hours)
