"""`isometry`: how much each candidate block stretches gradients at initialisation; it needs no training and no images.

The mean channel Jacobian of a block is M = E[v g^T] / pixels, where the signs g have the shape of the block's output,
v = J^T g is one vector-Jacobian product, and both are taken as (channels, pixels of the batch). Its largest singular
value is s, and a block is the better the smaller log s is. This is the block-wise part of `trainability` in AZ-NAS
(Lee and Ham, CVPR 2024, arXiv 2403.19232, section 3.3), with another function of s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nasfast.indicators.evidence import Evidence, NetworkEvidence, layer_space
from nasfast.indicators.registry import ScoreError, register
from nasfast.indicators.table import IndicatorTable
from nasfast.settings import Init
from nasfast.spaces import SKIP, LayerSpace, SearchSpace
from nasfast.supernet import InitScheme, ModuleSupernet, Supernet, initialize

PATHS = 10
"""Untrained networks that a table is averaged over."""

BATCH = 16
"""Images of noise of each network."""

PIXELS = 2048
"""A candidate takes only as many of the images as have this many pixels behind it, because more hardly say more."""


def random_signs(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Entries +1 or -1 with equal chances, in the shape, the type and on the device of `like`."""
    signs = torch.randint(0, 2, like.shape, generator=generator).to(like)
    return signs.mul_(2).sub_(1)


def mean_channel_jacobian(inputs: Tensor, outputs: Tensor, signs: Tensor, *, retain_graph: bool = False) -> Tensor:
    """M (C_in s^2, C_out): the mean over images and output pixels of the Jacobian between channels, from one product.

    With random signs the expectation of M is the mean, over images and output pixels p, of d outputs[p] / d inputs[q],
    where q are the s x s input pixels that p lies over. One draw adds noise of about sqrt(channels / pixels).

    Args:
        inputs: (N, C_in, H, W), a leaf of the graph of `outputs`.
        outputs: (N, C_out, ceil(H / s), ceil(W / s)); where the stride s does not divide H or W, zeros fill the rest.
        signs: in the shape of `outputs`.
        retain_graph: whether to keep the graph for another product.
    """
    if outputs.ndim != 4 or inputs.ndim != 4:
        raise ScoreError(
            f"a block must map (N, C, H, W) to such maps, got {tuple(inputs.shape)}, {tuple(outputs.shape)}"
        )
    v = None
    if outputs.requires_grad:
        (v,) = torch.autograd.grad(outputs, inputs, signs, retain_graph=retain_graph, allow_unused=True)
    if v is None or not v.any():
        raise ScoreError(
            "the output of a block does not depend on its input, so its Jacobian is 0: leave the block out"
        )
    (height, width), (h, w) = inputs.shape[2:], outputs.shape[2:]
    stride = max(math.ceil(height / h), math.ceil(width / w))
    if h > height or w > width:
        raise ScoreError(f"a block must not enlarge its maps, got {height} x {width} -> {h} x {w}")
    v = F.pixel_unshuffle(F.pad(v, (0, w * stride - width, 0, h * stride - height)), stride)
    rows, columns = v.transpose(0, 1).flatten(1), signs.transpose(0, 1).flatten(1)
    return rows @ columns.T / columns.shape[1]


def largest_singular_value(matrix: Tensor) -> float:
    """The largest singular value of a matrix (m, n), by the eigenvalues of the smaller Gram matrix in float64."""
    m = matrix.double()
    gram = m @ m.T if len(m) <= len(m.T) else m.T @ m
    return math.sqrt(max(torch.linalg.eigvalsh(gram)[-1].item(), 0.0))


def candidate_maps(
    of: SearchSpace | ModuleSupernet,
    *,
    activation: str | None = None,
    init: Init | InitScheme = "gaussian",
    paths: int = PATHS,
    batch: int = BATCH,
    pixels: int = PIXELS,
    seed: int = 0,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Run every candidate of every layer on maps of random paths; yields layer, choice, input and output.

    Every path has weights of its own and runs a batch of normal noise through candidates that are drawn uniformly. Then
    all candidates of each layer run on what the path gave the layer at its first call. The identity of a layer that
    keeps its shape is drawn as others are, but is not yielded. A module runs as a copy in eval mode and single
    precision. The settings are those of `isometry_table`.

    Yields:
        The layer, the choice, a leaf (n, C_in, H, W), and the output (n, C_out, H', W') whose graph leads to it. The
        caller may free the graph.
    """
    net: Supernet | ModuleSupernet
    if isinstance(of, ModuleSupernet):
        if not of.space.in_channels:
            raise ScoreError(
                f"{of.space.name} was not traced with square images (N, C, H, H), so noise cannot stand for them"
            )
        net, layout = copy.deepcopy(of).cpu().float(), torch.contiguous_format
        weights: nn.Module = net.module
    else:
        net = weights = Supernet(of, init=init, activation=activation, layer_indicators=False, seed=seed)
        layout = torch.channels_last
    space: LayerSpace = net.space
    net.requires_grad_(False).eval().to(memory_format=layout)
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[nn.Module, Tensor] = {}

    def keep_input(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any) -> None:
        # a layer of blocks gets its choice too
        values = (*args, *kwargs.values()) if isinstance(net, ModuleSupernet) else args[:1]
        if len(values) != 1 or not all(isinstance(value, Tensor) and value.ndim == 4 for value in (*values, y)):
            raise ScoreError(f"a choice of {space.name} does not map one (N, C, H, W) to another: take another score")
        # a copy, because what follows may work in place
        inputs.setdefault(layer, values[0][: max(2, math.ceil(pixels / math.prod(y.shape[2:])))].clone())

    for layer in net.layers:
        layer.register_forward_hook(keep_input, with_kwargs=True)
    for path in range(paths):
        initialize(weights, init, seed=int(torch.randint(2**31, (), generator=generator)) if path else seed)
        noise = torch.randn((batch, space.in_channels, space.resolution, space.resolution), generator=generator)
        inputs.clear()
        arch = [options[int(torch.randint(len(options), (), generator=generator))] for options in space.options]
        with torch.no_grad():
            net(noise.to(memory_format=layout), arch)
        for place, layer in enumerate(net.layers):
            leaf = inputs[layer].requires_grad_()
            for choice in space.options[place]:
                if choice not in (SKIP, space.layers[place].indicator_choice):
                    yield place, choice, leaf, layer.candidates[choice](leaf.clone())


def isometry_table(
    of: SearchSpace | ModuleSupernet,
    *,
    activation: str | None = None,
    init: Init | InitScheme = "gaussian",
    paths: int = PATHS,
    batch: int = BATCH,
    pixels: int = PIXELS,
    seed: int = 0,
) -> IndicatorTable:
    """The table iso(layer, choice) = -mean log s over paths of untrained supernets; 0 for the identity.

    Norms use the statistics of the batch, so the size of the weights before them has no influence.

    Args:
        of: a space of blocks, or the supernet of a module, which stays as it is.
        activation: activation of the blocks of layers that have none of their own; None takes the space's.
        init: initial weights; `gaussian` is He's scheme, up to scales that norms cancel.
        paths: number of paths, see `candidate_maps`; each gives every candidate one draw of signs.
        batch: images of noise per path, at least 2.
        pixels: a candidate takes the first images that have this many pixels behind it, at least 2 and at most all.
        seed: seed of weights, noise, paths and signs.

    Raises:
        ScoreError: the output of a block does not depend on its input, or s is not finite (the text names the block).
        ValueError: paths, batch or pixels are too few.
    """
    if paths < 1 or batch < 2 or pixels < 1:
        raise ValueError(f"paths and pixels must be at least 1 and batch at least 2, got {paths}, {pixels} and {batch}")
    settings: dict[str, Any] = {"paths": paths, "batch": batch, "pixels": pixels, "seed": seed}
    generator = torch.Generator().manual_seed(seed)
    space: LayerSpace = of.space if isinstance(of, ModuleSupernet) else of
    maps = candidate_maps(of, activation=activation, init=init, **settings)
    rows = [dict.fromkeys(options, 0.0) for options in space.options]
    for place, choice, x, y in maps:
        block = f"{space.place(place)}, {space.label(place, choice)}"
        try:
            s = largest_singular_value(mean_channel_jacobian(x, y, random_signs(y, generator)))
        except ScoreError as error:
            raise ScoreError(f"{block}: {error}") from error
        if not 0 < s < math.inf:
            raise ScoreError(f"{block}: the largest singular value of its mean Jacobian is {s}: give other weights")
        rows[place][choice] -= math.log(s) / paths
    return IndicatorTable.from_rows(space, rows, {"method": "isometry", **settings})


@register("isometry", additive=True, trained=False, images=False, networks=True)
def isometry(evidence: NetworkEvidence) -> IndicatorTable:
    """Minus the mean log of the largest singular value of each untrained block's mean channel Jacobian."""
    if isinstance(evidence, Evidence) and isinstance(evidence.net, ModuleSupernet):
        return isometry_table(evidence.net, seed=evidence.seed)
    activation = evidence.net.activation if isinstance(evidence, Evidence) else None
    space = layer_space(evidence)
    if not isinstance(space, SearchSpace):
        raise ScoreError(f"{space.name} is the space of a module: give Evidence(supernet, ...), which has the module")
    return isometry_table(space, activation=activation, seed=evidence.seed)
