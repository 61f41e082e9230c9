"""Scores from the gradients of a candidate's BatchNorms, averaged over sampled paths."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle

from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.indicators.evidence import Evidence
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.table import IndicatorTable
from nasfast.spaces import SKIP
from nasfast.supernet.supernet import ChoiceLayer

_IMAGES = 64
"""Images per path. They are few because more paths reduce the noise more than more images per path do."""


@register("beta_gradient", additive=True, trained=False)
def beta_gradient(evidence: Evidence) -> IndicatorTable:
    """Mean over paths of sqrt(sum |dL/dbeta|^2) over a candidate's BatchNorms, before training.

    It hardly depends on the images or their labels, so it measures structure (docs/ranking.md). The beta of an identity
    has no effect, because a convolution with BatchNorm follows, so an identity scores about 0.
    """
    return _averaged(evidence, lambda norms: math.sqrt(sum(_squares(_gradient(bn.bias)) for bn in norms)))


@register("fisher", additive=True)
def fisher(evidence: Evidence) -> IndicatorTable:
    """Mean over paths of the sum of (gamma dL/dgamma)^2 over a candidate's BatchNorms, of the trained supernet."""
    return _averaged(
        evidence, lambda norms: sum((_squares(bn.weight.detach() * _gradient(bn.weight)) for bn in norms), 0.0)
    )


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise ScoreError(
            "a BatchNorm of a candidate has no gradient: the forward of a block must run all its BatchNorms"
        )
    return parameter.grad


def _squares(values: Tensor) -> float:
    return values.double().square().sum().item()


def _averaged(evidence: Evidence, of_norms: Callable[[list[nn.BatchNorm2d]], float]) -> IndicatorTable:
    """The mean over the sampled paths through each candidate of a function of its BatchNorms after backward."""
    net, space = evidence.net, evidence.net.space
    samples: list[dict[int, list[float]]] = [{value: [] for value in values} for values in evidence.values]
    with evidence.norms_train():
        for path, (x, y) in zip(evidence.sample(), cycle(evidence.batches), strict=False):
            for parameter in net.parameters():
                parameter.grad = None
            F.cross_entropy(evidence.logits(x[:_IMAGES], path), y[:_IMAGES]).backward()
            for row, candidates, choice in zip(samples, net.layers, path, strict=True):
                row[choice].append(of_norms(_norms(candidates, choice)))
    rows = []
    for i, (row, layer) in enumerate(zip(samples, space.layers, strict=True)):
        for choice, values in row.items():
            if not values:
                raise ScoreError(
                    f"no sampled path runs through layer {i}, choice {choice} ({layer.label(choice)}): give more than "
                    f"{evidence.paths} paths"
                )
        rows.append({choice: sum(values) / len(values) for choice, values in row.items()})
    return IndicatorTable.of_rows(space, rows, {})


def _norms(layer: ChoiceLayer, choice: int) -> list[nn.BatchNorm2d]:
    """The BatchNorms that a choice runs."""
    if layer.layer_indicator is not None and choice == layer.layer.indicator_choice:
        return [layer.layer_indicator]
    if choice == SKIP:
        return []
    return [module for module in layer.candidates[choice].modules() if isinstance(module, nn.BatchNorm2d)]
