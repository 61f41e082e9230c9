"""A smaller network as a plain module of the class of the larger one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nasfast.runtime.arguments import check_type
from nasfast.shrink.channels import Dimension, Layer
from nasfast.shrink.graph import ShrinkError
from nasfast.shrink.measure import Measured, Solution, unit_channels
from nasfast.shrink.recipe import Dropped, Recipe, Slice, rebuild, shapes_digest


def make_recipe(measured: Measured, arch: Iterable[int]) -> Recipe:
    """What the network of an architecture keeps.

    Raises:
        ArchError: arch is not one of the space.
    """
    found = measured.found
    arch = found.space.check(arch)
    slices: dict[str, dict[str, Any]] = {}
    dropped = []
    for dimension, solution in _chosen(measured, arch):
        for layer in (*dimension.producers, *dimension.tied):
            entry = slices.setdefault(layer.path, {})
            entry["rows"] = _kept(dimension, solution, layer.rows)
            if layer.groups > 1:
                entry["groups"] = layer.groups * len(solution.kept) // dimension.units
        for norm in dimension.norms:
            slices.setdefault(norm.path, {})["rows"] = _kept(dimension, solution, norm.features)
        for layer in dimension.readers:
            entry = slices.setdefault(layer.path, {})
            entry["columns"] = _kept(dimension, solution, layer.inputs)
            entry["bias"] = layer.gains_bias
    for place, value in zip(found.places, arch, strict=True):
        if place.candidates[value] is None and place.block is not None:
            dropped.append(Dropped(place.block.path, place.block.relu))
    return Recipe(
        arch,
        found.space.fingerprint,
        found.space.resolution,
        shapes_digest(found.model),
        tuple(Slice(path, **entry) for path, entry in slices.items()),
        tuple(dropped),
    )


def cut(measured: Measured, arch: Iterable[int]) -> nn.Module:
    """The network of an architecture, in evaluation mode: a copy of the network whose modules are narrower.

    It has the classes, the hooks and the names of the larger network; a dropped block is an `nn.Identity`, or an
    `nn.ReLU` where one followed its addition. The layers that read narrowed channels have the least-squares weights of
    `measure`; the change of their mean goes into the BatchNorm behind them or into their bias.

    Args:
        measured: from `measure`.
        arch: an architecture of `measured.found.space`, such as `search_table(...)[0].arch`.

    Raises:
        ArchError: arch is not one of the space.
        ShrinkError: the forward of the network has a width as a number, so that it does not run with another one.
    """
    check_type("measured", measured, Measured, advice="nasfast.shrink.measure(found, images) makes one")
    found = measured.found
    recipe = make_recipe(measured, arch)
    small = rebuild(found.model, recipe).eval()
    rows = {part.module: part.rows for part in recipe.slices}
    with torch.no_grad():
        for dimension, solution in _chosen(measured, recipe.arch):
            for layer in dimension.readers:
                _put(small, layer, solution, rows[layer.path])
    example = torch.zeros(1, *found.program.image.meta["val"].shape[1:])
    example = example.to(next(iter(small.parameters())))
    try:
        with torch.no_grad():
            small(example)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise ShrinkError(
            f"the forward of {type(small).__name__} does not run with fewer channels ({line}): write its sizes as "
            "sizes of its tensors and not as numbers"
        ) from error
    return small


def _chosen(measured: Measured, arch: tuple[int, ...]) -> Iterable[tuple[Dimension, Solution]]:
    """The dimensions that are narrowed, and their solutions."""
    for place, rows, value in zip(measured.found.places, measured.solutions, arch, strict=True):
        for dimension, row, width in zip(place.dimensions, rows, place.candidates[value] or (), strict=False):
            if width != dimension.units:
                yield dimension, row[width]


def _kept(dimension: Dimension, solution: Solution, channels: int) -> tuple[int, ...]:
    return tuple(unit_channels(solution.kept, channels // dimension.units).tolist())


def _put(model: nn.Module, layer: Layer, solution: Solution, rows: tuple[int, ...] | None) -> None:
    """Set the weights of a layer, and the change of its mean."""
    module: Any = model.get_submodule(layer.path)
    weight, extra = solution.weights[layer.path], solution.biases[layer.path]
    if rows is not None:
        weight, extra = weight[list(rows)], extra[list(rows)]
    module.weight.copy_(weight.view_as(module.weight))
    if layer.norm is not None:
        norm: Any = model.get_submodule(layer.norm.path)
        norm.running_mean.sub_(extra.to(norm.running_mean))
    else:
        module.bias.add_(extra.to(module.bias))
