"""The isometry study: `run(config, out, task) -> IsometryReport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nasfast.measure.timing import random_batch
from nasfast.research.analysis.fairness import depth_spread
from nasfast.research.analysis.meanfield import PhaseDiagram, phase_diagram
from nasfast.research.studies.inputs import maker, sample_shape
from nasfast.research.studies.isometry import tables
from nasfast.research.studies.isometry.claims import claims_of
from nasfast.research.studies.isometry.config import IsometryConfig
from nasfast.research.studies.isometry.measure import (
    block_marks,
    measure_convolutions,
    measure_module,
    measure_supernet,
)
from nasfast.research.studies.isometry.rows import EDGES, ConvolutionMoments, PathSpread, Row, Spread, spread_means
from nasfast.research.studies.parts import plain
from nasfast.research.studies.report import StudyReport
from nasfast.research.studies.run import Task, run_study
from nasfast.spaces import SearchSpace, get_space, mean_path
from nasfast.supernet import Init, Supernet, initialize

# Few images are enough, because variances are averaged over channels and positions.
_DEPTH_IMAGES = 16
_DIAGRAM_ACT = "tanh"


@dataclass(frozen=True, kw_only=True)
class IsometryReport(StudyReport):
    """Everything that the study measured. Its file and its page are made from rows instead of tables.

    Attributes:
        settings: initialisations in order.
        rows: one row for every setting, layer and candidate.
        fairness: spreads for every setting and layer, with and without indicator BatchNorms.
        depth: path spreads for every setting, with and without indicator BatchNorms.
        convolutions: moments for every setting and kind of convolution.
        diagram: the phase diagram of the activation that the theory assumes, tanh.
    """

    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    fairness: tuple[Spread, ...] = ()
    depth: tuple[PathSpread, ...] = ()
    convolutions: tuple[ConvolutionMoments, ...] = ()
    diagram: PhaseDiagram

    @property
    def fairness_means(self) -> list[Spread]:
        """Means of the spreads over layers; see `rows.spread_means`."""
        return spread_means(self.fairness)

    @property
    def heading(self) -> str:
        return f"isometry of {self.subject}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON."""
        diagram = {name: np.round(values, 6) for name, values in vars(self.diagram).items()}
        return plain(
            {
                "config": self.config.to_dict(),
                "subject": self.subject,
                "reduced": self.notes,
                "settings": self.settings,
                "rows": self.rows,
                "histogram_edges": EDGES,
                "fairness": self.fairness,
                "fairness_means": self.fairness_means,
                "depth": self.depth,
                "convolutions": self.convolutions,
                "diagram": {"act": _DIAGRAM_ACT, **diagram},
                "marks": self.checks,
                "claims": self.claims,
                **self.run_form(),
            }
        )

    def text_of_findings(self) -> list[str]:
        """What was made smaller to take minutes, and the tables."""
        return [
            *(f"reduced: {note}" for note in self.notes),
            "",
            *tables.candidate_lines(self.settings, self.rows),
            *tables.convolution_lines(self.convolutions),
            *tables.fairness_lines(self.fairness),
            *tables.depth_lines(self.depth),
        ]


def isometry_study(cfg: IsometryConfig | None = None) -> IsometryReport:
    """Measure every candidate of a space, or the parts of a module, under orthogonal and Gaussian weights.

    Args:
        cfg: the space or the module, and how much to measure; None takes the defaults.

    Raises:
        ConfigError: unknown space, a module that cannot be imported or made, or an unusable input shape.
        ValueError: a module that cannot take the input, cannot be differentiated, or whose Jacobian is not finite.
    """
    return run_study("isometry", cfg)


def run(cfg: IsometryConfig, out: Path | None, task: Task) -> IsometryReport:
    """A space, or any module; see `isometry_study`."""
    return _space(cfg, cfg.resolve(), task) if cfg.module is None else _module(cfg, cfg.module, task)


def _space(cfg: IsometryConfig, space: SearchSpace, task: Task) -> IsometryReport:
    own = space.activation
    # the setting of the theory first, then that of the space, then the baseline
    settings: dict[str, tuple[Init, str]] = {
        "orthogonal, tanh": ("orthogonal", "tanh"),
        f"orthogonal, {own}": ("orthogonal", own),
        f"gaussian, {own}": ("gaussian", own),
    }
    images, _ = random_batch(space, cfg.batch, seed=cfg.seed)
    images = images.contiguous()
    few = images[:_DEPTH_IMAGES]
    rows, spreads, depth, convolutions = [], [], [], []
    marks = block_marks(own, seed=cfg.seed)
    for setting, (init, act) in settings.items():
        net = Supernet(space, init=init, activation=act, layer_indicators=False, fused=False, seed=cfg.seed)
        path = mean_path(space) if cfg.inputs == "propagated" else None
        of_setting, spreads_of_setting = measure_supernet(
            net, images, cfg.effort, setting=setting, path=path, task=task
        )
        rows += of_setting
        spreads += spreads_of_setting
        for indicator_bn in (True, False):
            found = depth_spread(net, few, paths=cfg.paths, indicator_bn=indicator_bn, seed=cfg.seed)
            depth.append(PathSpread(setting, indicator_bn, **asdict(found)))
        if act == own:
            kinds, of_convolutions = measure_convolutions(net, setting=setting, scheme=init)
            convolutions += kinds
            marks += of_convolutions
    inputs = "white noise at every layer" if cfg.inputs == "white" else "white images, propagated along the mean path"
    return IsometryReport(
        subject=f"space {space.name}, {len(space)} layers, inputs: {inputs}",
        notes=_reductions(cfg, space, len(few)),
        settings=tuple(settings),
        rows=tuple(rows),
        fairness=tuple(spreads),
        depth=tuple(depth),
        convolutions=tuple(convolutions),
        diagram=_diagram(),
        checks=tuple(marks),
        claims=tuple(claims_of(own, rows, spreads, depth, convolutions)),
    )


def _reductions(cfg: IsometryConfig, space: SearchSpace, images: int) -> tuple[str, ...]:
    """What is smaller than in the paper, so that a study takes minutes."""
    full = get_space(cfg.space).resolution
    smaller = f" instead of {full}" if full != space.resolution else ""
    return (
        f"{space.resolution} x {space.resolution} images{smaller}",
        f"{cfg.samples} samples and {cfg.probes} random probes per candidate, {cfg.lanczos_steps} Lanczos steps per "
        f"density; statistics of {cfg.batch} samples",
        f"{cfg.paths} random paths, {images} images, one seed",
    )


def _module(cfg: IsometryConfig, name: str, task: Task) -> IsometryReport:
    make = maker(name)
    x = torch.randn(cfg.batch, *sample_shape(cfg.input), generator=torch.Generator().manual_seed(cfg.seed))
    rows = []
    settings: dict[str, Init | None] = {"as it is": None, "orthogonal": "orthogonal", "gaussian": "gaussian"}
    for setting, init in settings.items():
        module = make()
        try:
            if init is not None:
                initialize(module, init, seed=cfg.seed)
            rows += measure_module(module, x, cfg.effort, setting=setting, task=task)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"module {name!r}, input {cfg.input}, {setting}: {error}") from error
    return IsometryReport(
        subject=f"module {name}, inputs: white noise of shape {cfg.input}",
        notes=(f"{cfg.samples} samples and {cfg.probes} random probes per part; statistics of {cfg.batch} samples",),
        settings=tuple(settings),
        rows=tuple(rows),
        diagram=_diagram(),
    )


def _diagram() -> PhaseDiagram:
    return phase_diagram(_DIAGRAM_ACT, np.linspace(0.5, 3, 51), np.linspace(0, 1, 26))
