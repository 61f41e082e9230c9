"""How a study is carried out: its threads, and what its report says of the machine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nasfast.measure.doctor import environment
from nasfast.measure.timing import machine, measuring
from nasfast.research.studies import registry
from nasfast.research.studies.report import StudyReport
from nasfast.runtime.device import torch_device
from nasfast.settings import TaskSettings


def run_study(
    name: str, config: Any = None, *, out: str | Path | None = None, tasks: TaskSettings | None = None
) -> StudyReport:
    """Run a study of the registry with the threads of its config, with progress on standard error.

    Args:
        name: such as `isometry` or `moments quick`.
        config: an instance of the study's config class; None takes its defaults.
        out: directory that the study may resume from and write to; None for none.
        tasks: where the parts of a study that has `tasks` run in processes of their own; None for this process.

    Returns:
        The study's report with `name`, `config`, `seconds`, `machine` and `environment`.

    Raises:
        ConfigError: the config's device is cuda and there is none.
    """
    study = registry.find(name)
    run, config = study.load("run"), study.load("config")() if config is None else config
    device = str(torch_device(getattr(config, "device", "cpu")))
    start = time.perf_counter()
    with measuring(config.threads):
        more = {} if tasks is None else {"tasks": tasks}
        found: StudyReport = run(config, None if out is None else Path(out), **more)
        where = {"device": device, **machine()}
    seconds = time.perf_counter() - start
    return replace(found, name=study.files, config=config, seconds=seconds, machine=where, environment=environment())
