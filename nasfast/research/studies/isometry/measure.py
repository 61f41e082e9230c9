"""What the isometry study measures: the candidates of a space, or the parts of a module, one `Row` each."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nasfast.ops.modules import ConvBNAct, InvertedResidual
from nasfast.research.analysis.fairness import SPREADS, channel_moments, fairness, without_block_indicator
from nasfast.research.analysis.jacobian import Isometry, apply, frozen_copy, isometry
from nasfast.research.studies.isometry.config import IsometryConfig
from nasfast.research.studies.report import Record
from nasfast.research.studies.run import Task, no_task
from nasfast.spaces import SKIP, Arch
from nasfast.supernet import Supernet
from nasfast.supernet.blocks import DenseInvertedResidual, ShuffleUnit

_LOG = logging.getLogger(__name__)

EDGES = np.linspace(0, 5, 51)
"""Bins of the singular value histograms."""
# Up to this many elements it is cheaper to form a Jacobian than to probe it.
_MAX_EXACT = 2**16


@dataclass(frozen=True)
class Row:
    """One candidate of one layer, or one part of a module, under one setting.

    Attributes:
        layer: index, or -1 in a module that is no supernet.
        branch: isometry without the skip connection or the bypassing half; this is what is judged.
        module: isometry with it; None where both are the same.
        var_in, var_out: variance of the branch's input and output, averaged over channels.
        acts: activations in the branch; None if unknown.
        histogram: share of the branch's singular values in every bin of EDGES.
    """

    setting: str
    layer: int
    name: str
    branch: Isometry
    module: Isometry | None
    var_in: float
    var_out: float
    acts: int | None
    histogram: tuple[float, ...]

    @property
    def gain(self) -> float:
        """phi Var(in) / Var(out): how much faster small differences grow than the signal; 1 for a linear branch."""
        return self.branch.phi * self.var_in / self.var_out if self.var_out > 0 else math.nan

    @property
    def place(self) -> str:
        """Where it stands on the horizontal axis of a figure."""
        return f"layer {self.layer}" if self.layer >= 0 else self.name

    def to_dict(self) -> dict[str, Any]:
        """The row with its gain."""
        return {**vars(self), "gain": self.gain}


@dataclass(frozen=True)
class Measured:
    """All that the study measured; of a module, rows alone.

    Attributes:
        rows: setting -> its rows.
        fairness: for each setting and layer, with and without block indicators, the SPREADS (None: not known).
        depth: for each setting, with and without block indicators, what `depth_spread` gives.
        convolutions: for each setting and kind of convolution, its moments and the closed form.
    """

    rows: Mapping[str, Sequence[Row]]
    fairness: Sequence[Record] = ()
    depth: Sequence[Record] = ()
    convolutions: Sequence[Record] = ()

    @property
    def all_rows(self) -> list[Row]:
        """The rows of every setting, one setting after another."""
        return [row for rows in self.rows.values() for row in rows]

    @property
    def fairness_means(self) -> list[Record]:
        """Means over layers, by setting, with and without block indicators; None where no layer has a value."""
        means: list[Record] = []
        for setting in dict.fromkeys(record["setting"] for record in self.fairness):
            for indicator in (True, False):
                mean: dict[str, Any] = {"setting": setting, "block_indicator": indicator}
                layers = [x for x in self.fairness if (x["setting"], x["block_indicator"]) == (setting, indicator)]
                for spread in SPREADS:
                    values = [layer[spread] for layer in layers if layer[spread] is not None]
                    mean[spread] = float(np.mean(values)) if values else None
                means.append(mean)
        return means

    def data(self) -> dict[str, Any]:
        """What the JSON says."""
        return {
            "settings": list(self.rows),
            "rows": self.all_rows,
            "histogram_edges": EDGES,
            "fairness": self.fairness,
            "fairness_means": self.fairness_means,
            "depth": self.depth,
            "convolutions": self.convolutions,
        }


def select_branch(block: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """The branch of a block, without skip connection or bypass, and what selects its part of the block's input."""
    if isinstance(block, (InvertedResidual, DenseInvertedResidual)) and block.has_residual:
        branch = copy.deepcopy(block)
        branch.has_residual = False
        return branch, lambda x: x
    if isinstance(block, ShuffleUnit):
        return block.main, (lambda x: x[:, 1::2].contiguous()) if block.projection is None else (lambda x: x)
    return block, lambda x: x


def _measure(
    module: nn.Module, h: Tensor, cfg: IsometryConfig, setting: str, name: str, layer: int = -1, acts: int | None = None
) -> Row:
    """Measure one module at the inputs h (N, ...), as a row whose branch is the module."""
    branch = isometry(module, h, max_exact=_MAX_EXACT, **cfg.effort)
    with torch.no_grad():
        y = apply(frozen_copy(module, h), h)
    var_in, var_out = (channel_moments(v)[1] if v.ndim > 1 else float(v.double().var(correction=0)) for v in (h, y))
    return Row(setting, layer, name, branch, None, var_in, var_out, acts, tuple(branch.histogram(EDGES).tolist()))


def _measure_block(block: nn.Module, h: Tensor, cfg: IsometryConfig, setting: str, name: str, layer: int) -> Row:
    """Measure a candidate: its branch, and the whole of it where there is more."""
    branch, part = select_branch(block)
    acts = sum(isinstance(m, ConvBNAct) and m.act_name != "identity" for m in branch.modules())
    row = _measure(branch, part(h), cfg, setting, name, layer, acts)
    if branch is block:
        return row
    # no density is computed, because it takes most of the time
    return replace(row, module=isometry(block, h, max_exact=_MAX_EXACT, **{**cfg.effort, "lanczos_steps": 0}))


def measure_supernet(
    net: Supernet, images: Tensor, cfg: IsometryConfig, *, setting: str, path: Arch | None, task: Task = no_task
) -> tuple[list[Row], list[dict[str, Any]]]:
    """Measure every candidate of every layer, and how much the candidates of a layer differ.

    Args:
        net: a supernet of plain modules (`fused=False`); not changed.
        images: (N, C, H, W); their number is that of the white inputs too.
        cfg: how much to spend on each candidate, and the seed of white noise.
        setting: name of the rows.
        path: through which the images propagate to each layer; None gives every layer white noise of its own shape.
        task: tells the progress.

    Returns:
        `rows` and `fairness` of this setting, as `Measured` has them.
    """
    rows, spreads = [], []
    done = task(setting, len(net.layers))
    # the signs of the probes begin from the same seed; a stream of its own would change the published figures
    generator = torch.Generator().manual_seed(cfg.seed)
    with torch.no_grad():
        h = net.stem(images)
    for index, choice_layer in enumerate(net.layers):
        layer = choice_layer.layer
        if path is None:
            h = torch.randn(len(images), layer.in_channels, layer.size, layer.size, generator=generator)
        blocks = {layer.label(c): m for c, m in enumerate(choice_layer.candidates) if not isinstance(m, nn.Identity)}
        layer_rows = [_measure_block(block, h, cfg, setting, name, index) for name, block in blocks.items()]
        rows += layer_rows
        for indicator in (True, False) if len(blocks) > 1 else ():
            candidates = [b if indicator else without_block_indicator(b) for b in blocks.values()]
            # the Jacobians were measured with the BatchNorms
            spread = fairness(candidates, h, phi=[row.branch.phi for row in layer_rows] if indicator else None)
            spreads.append({"setting": setting, "layer": index, "block_indicator": indicator, **spread})
        if path is not None and path[index] != SKIP:
            with torch.no_grad():
                h = choice_layer.candidates[path[index]](h)
        done(index + 1)
    return rows, spreads


def _named_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the children; an `nn.Sequential` is replaced by its children."""
    for name, child in module.named_children():
        if type(child) is nn.Sequential:
            yield from _named_parts(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def measure_module(
    module: nn.Module, x: Tensor, cfg: IsometryConfig, *, setting: str, task: Task = no_task
) -> list[Row]:
    """Measure a module as a whole, and each of its parts at the input that reaches it; x is (N, ...).

    Parts without parameters, parts that are used several times, and parts that do not map one tensor to one are left
    out.
    """
    frozen = frozen_copy(module, x)
    inputs: dict[str, list[Any]] = {}
    for name, part in _named_parts(frozen):
        # a part may be called with keywords alone
        part.register_forward_pre_hook(
            lambda _, args, name=name: inputs.setdefault(name, []).append(next(iter(args), None))
        )
    with torch.no_grad():
        apply(frozen, x)
    done = task(setting, 1 + len(inputs))
    rows = [_measure(module, x, cfg, setting, "whole")]
    parts = dict(_named_parts(module))
    for index, (name, calls) in enumerate(inputs.items(), 1):
        done(index)
        # a part that is used several times has several Jacobians, none of which is its own
        single = len(calls) == 1 and isinstance(calls[0], Tensor) and calls[0].ndim > 1
        if not single or next(parts[name].parameters(), None) is None:
            continue
        try:
            rows.append(_measure(parts[name], calls[0], cfg, setting, name))
        except ValueError as error:
            _LOG.info("%s: part %s left out: %s", setting, name, error)
    done(1 + len(inputs))
    return rows
