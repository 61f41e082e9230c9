"""Settings of the supernet, and the presets of the methods."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from nasfast.config import ConfigBase, nearest

Init = Literal["orthogonal", "aligned", "delta_orthogonal", "gaussian", "he"]
Trainable = Literal["indicators", "bn", "all"]
MethodName = Literal["dinas", "dinas_paper", "bnnas", "fairnas", "spos"]


@dataclass(frozen=True)
class Method:
    """The preset of a method: what distinguishes it from the others.

    Attributes:
        init: initialisation scheme of the weights.
        layer_indicators: whether normal layers have a path identity -> BN beside their candidates.
        trainable: what trains in the supernet.
        classifier: whether the classifier trains too (`all` includes it).
        sampler: key of `nasfast.spaces.SAMPLERS`.
        hold_out: whether `data.val_fraction` of the training images are kept out of supernet training, for the score.
        score: name of a score in `nasfast.indicators.scores`.
        distill: whether a score of paths is fitted by a table; otherwise the search scores path by path.
        structure: weight of the baseline `sqrt_size`, which is added to the score.
    """

    init: Init
    layer_indicators: bool
    trainable: Trainable
    classifier: bool
    sampler: Literal["uniform", "fair", "strict_fair"]
    hold_out: bool
    score: str
    distill: bool
    structure: float


METHODS: dict[MethodName, Method] = {
    "dinas": Method("aligned", True, "bn", True, "fair", True, "path_loss", True, 4.0),
    "dinas_paper": Method("orthogonal", True, "indicators", False, "fair", False, "gamma", True, 0.0),
    "bnnas": Method("he", False, "indicators", False, "uniform", False, "gamma", True, 0.0),
    "fairnas": Method("he", False, "all", False, "strict_fair", True, "recalibrated_accuracy", False, 0.0),
    "spos": Method("he", False, "all", False, "uniform", True, "recalibrated_accuracy", False, 0.0),
}
"""`dinas` is this package's method (docs/ranking.md). The others follow their publications: DI-NAS (`dinas_paper`),
BN-NAS, FairNAS and Single Path One-Shot."""


@dataclass(frozen=True)
class SupernetConfig(ConfigBase):
    """How the supernet is built and trained; null takes the method's preset.

    Attributes:
        init: initialisation scheme: `orthogonal`, `aligned`, `delta_orthogonal`, `gaussian` or `he`.
        alignment: the centre tap's share of a depthwise filter for `init: aligned`, from 0 to 1; null takes 0.7, or 0.9
            in a space of more than ten searched layers.
        linear_share: share of the common linear part in a projection for `init: aligned`, from 0 to 1; null takes 0.85,
            or 0.95 in such a space.
        shift: initial beta of the BatchNorms in front of activations for `init: aligned`; null takes 0, or 1 in such a
            space.
        branch_scale: initial gamma of the last BatchNorm of blocks that add their input for `init: aligned`; null takes
            1, or 0.3 in such a space.
        layer_indicators: whether normal layers have a path identity -> BN beside their candidates.
        trainable: what trains: `indicators`, `bn` or `all`.
        classifier: whether the classifier trains too (`trainable: all` includes it).
        sampler: `fair` (Algorithm 1), `strict_fair` (FairNAS) or `uniform` (SPOS).
        activation: activation of the blocks of layers that have none of their own; null takes the space's.
        hold_out: whether to keep `data.val_fraction` of the training images out of supernet training; scores of paths
            need them.
    """

    init: Init | None = None
    alignment: float | None = None
    linear_share: float | None = None
    shift: float | None = None
    branch_scale: float | None = None
    layer_indicators: bool | None = None
    trainable: Trainable | None = None
    classifier: bool | None = None
    sampler: Literal["uniform", "fair", "strict_fair"] | None = None
    activation: Literal["identity", "relu", "relu6", "tanh", "hswish", "silu"] | None = None
    hold_out: bool | None = None

    def _check_values(self) -> None:
        for name, value in self.aligned.items():
            if name in ("alignment", "linear_share") and not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value}")
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    def preset(self, method: str) -> Method:
        """The method's preset, with the values that are set here in place of its own.

        Raises:
            ValueError: unknown method, or settings of aligned weights for weights that are not aligned.
        """
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; {nearest(method, METHODS)}")
        names = ("init", "layer_indicators", "trainable", "classifier", "sampler", "hold_out")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        chosen = replace(METHODS[method], **given)
        if self.aligned and chosen.init != "aligned":
            name, value = next(iter(self.aligned.items()))
            raise ValueError(
                f"{name}={value} needs init='aligned', got init={chosen.init!r}: leave {name} out, or set the init"
            )
        return chosen

    @property
    def aligned(self) -> dict[str, float]:
        """The settings of aligned weights that are set, by name."""
        names = ("alignment", "linear_share", "shift", "branch_scale")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def resolved(self, method: str) -> SupernetConfig:
        """Every null but activation and settings of aligned weights replaced by the preset; errors as in `preset`."""
        chosen = self.preset(method)
        return self.replace(**{f.name: getattr(chosen, f.name) for f in fields(self) if hasattr(chosen, f.name)})


DEEP_LAYERS = 10
"""Spaces of more searched layers than this take other initial weights (`init: aligned`) and another learning rate."""


ALL_LR = 0.1
"""Peak learning rate of a network all of whose weights train, where none is given."""


def default_lr(trainable: Trainable, layers: int) -> float:
    """Peak learning rate where none is given.

    The gradients of indicators are small: at 0.1 the gammas of a frozen network hardly leave 1 in a few thousand steps.
    Indicators take 0.5, the supernet rate of the Single Path One-Shot and BN-NAS settings. All BatchNorms together take
    0.4, or 0.05 in a space of more than ten searched layers (docs/ranking.md 3).

    Args:
        trainable: what trains.
        layers: number of searched layers of the space.
    """
    return {"indicators": 0.5, "bn": 0.05 if layers > DEEP_LAYERS else 0.4, "all": ALL_LR}[trainable]
