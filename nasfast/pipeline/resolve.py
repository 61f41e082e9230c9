"""The settings of a run without a null or `auto` that a result depends on."""

from __future__ import annotations

import contextlib

from nasfast.config import ConfigError, load_yaml
from nasfast.settings import CONFIG_FILE, RunConfig, TrainConfig


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

    def known(train: TrainConfig, before: TrainConfig) -> TrainConfig:
        name = before.precision if train.precision == "auto" else train.precision
        return train.replace(precision=resolve_precision(name, cfg.device))

    retrain = cfg.retrain.replace(train=known(cfg.retrain.train, saved.retrain.train))
    return cfg.replace(train=known(cfg.train, saved.train), retrain=retrain)
