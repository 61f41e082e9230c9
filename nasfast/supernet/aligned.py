"""Aligned weights: the candidates of a layer differ, but the linear part of each is the same function.

Independent draws give candidates outputs of equal norm but not of equal direction: on a layer that changes shape, the
outputs of two candidates do not correlate, and the layers behind get another input for each candidate. So the
candidates of a layer share one matrix R (out x in, Haar times sqrt(max(1, out / in))). Let P_1, ..., P_n be the
pointwise weights along a path of units from a block's input to its output. The last one is chosen so that their product
is beta R:

    P_n = g (beta R Q^T / s + sqrt(1 - beta^2) N),    Q = P_(n-1) ... P_1,    Q^T Q = s 1,    N Q = 0

where g is the gain of the activation behind P_n, and N is a random matrix with a draw of its own for every candidate
and sqrt(t) times the norm of R Q^T / s, t being rows over columns of Q. So N reads only what the activations add to the
linear part. Where Q is square, as for an expansion of 1, there is no such N and P_n = g R Q^T / s. The strided
convolution of an identity is R itself.

With beta = 1 the inverted residual of an expansion t has P_2 = R P_1^T / t, and the wider it is, the more linear it is:
a sum of w |w x| over directions w that are symmetric around 0 has the expectation 0, so the mean square of what the
activation adds falls like 1 / t. Such a supernet underrates wide blocks (docs/ranking.md 1). Through N, that mean
square does not depend on t.

A depthwise filter is alpha times the centre tap plus sqrt(1 - alpha^2) times a random filter of norm 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from nasfast.ops.modules import ConvBNAct
from nasfast.ops.orthogonal import Target, fill_orthogonal

# "layers.3.candidates.2" belongs to the layer "layers.3"
_CANDIDATE = re.compile(r"\.?\bcandidates\.\d+$")


def align(module: nn.Module, alpha: float, beta: float, gains: Mapping[str, float], *, seed: int) -> None:
    """Align weights that were drawn independently (pointwise Haar, depthwise of norm 1).

    Args:
        module: every block in it that has `linear_paths()` is aligned. That method gives a mapping from role to the
            ConvBNAct units from the block's input (or a part of its channels) to its output. A pointwise convolution
            before the last must not narrow.
        alpha: share of the centre tap in a depthwise filter, from 0 to 1.
        beta: share of the common linear part in the last pointwise weight of a path, from 0 to 1.
        gains: gain of a convolution by the name of the activation behind it.
        seed: seed of the matrices R; each has its own random stream by layer, role and shape.
    """
    paths = list(_paths(module))
    names = [f"{name}.aligned|{shape}" for name, _, shape in paths]
    targets = {
        name: Target(name, torch.empty(shape, dtype=torch.float64), shape, math.sqrt(max(1.0, shape[0] / shape[1])))
        for name, (_, _, shape) in zip(names, paths, strict=True)
    }
    fill_orthogonal(list(targets.values()), seed)
    for name, (_, units, _) in zip(names, paths, strict=True):
        _align_path(units, targets[name].tensor, alpha, beta, gains)


def _paths(module: nn.Module) -> Iterator[tuple[str, list[ConvBNAct], tuple[int, int]]]:
    """Yield (layer and role, units, shape of R) of every path of every block."""
    for name, block in module.named_modules():
        if not hasattr(block, "linear_paths"):
            if _CANDIDATE.search(name) and not isinstance(block, nn.Identity):
                raise ValueError(
                    f"init='aligned': {name} is a {type(block).__name__}, whose linear part is not known: choose "
                    "init='orthogonal', or give the module a method linear_paths()"
                )
            continue
        for role, units in block.linear_paths().items():
            pointwise = [unit.conv for unit in units if not _is_depthwise(unit)]
            for conv in pointwise:
                if max(conv.kernel_size) > 1 or conv.groups > 1:
                    raise ValueError(f"init='aligned': {name} has {conv}, which is neither pointwise nor depthwise")
            for conv in pointwise[:-1]:
                if conv.out_channels < conv.in_channels:
                    raise ValueError(
                        f"init='aligned': {name} narrows from {conv.in_channels} to {conv.out_channels} channels "
                        "before its last convolution, so its linear part cannot be any given matrix: choose "
                        "init='orthogonal'"
                    )
            shape = (pointwise[-1].out_channels, pointwise[0].in_channels)
            yield f"{_CANDIDATE.sub('', name)}.{role}".strip("."), units, shape


def _is_depthwise(unit: ConvBNAct) -> bool:
    return unit.conv.groups == unit.conv.in_channels > 1


def _align_path(units: list[ConvBNAct], shared: Tensor, alpha: float, beta: float, gains: Mapping[str, float]) -> None:
    """Change the last pointwise weight and the depthwise filters of one path; `shared` is R."""
    *inner, last = [unit for unit in units if not _is_depthwise(unit)]
    if inner:
        product, *matrices = [unit.conv.weight.flatten(1).to(shared) for unit in inner]
        for matrix in matrices:
            product = matrix @ product
        weight = _last_weight(shared, product, last.conv.weight.flatten(1).to(shared), beta)
    else:
        weight = shared
    last.conv.weight.copy_((gains[last.act_name] * weight).reshape(last.conv.weight.shape))
    for unit in units:
        if _is_depthwise(unit):
            filters, (height, width) = unit.conv.weight, unit.conv.kernel_size
            filters.mul_(math.sqrt(1 - alpha**2))
            filters[..., height // 2, width // 2] += alpha * gains[unit.act_name]


def _last_weight(shared: Tensor, product: Tensor, own: Tensor, beta: float) -> Tensor:
    """P_n / g of the module's docstring: `shared` is R, `product` is Q, and N is made of `own`.

    N = c (own - own Q Q^T / s). Because Q^T Q = s 1, the norms that c needs follow from those of own and own Q. So the
    result is sqrt(1 - beta^2) c own plus one product with Q^T.
    """
    hidden, channels = product.shape
    scale = product.square().sum() / channels
    if hidden == channels:
        return shared @ product.T / scale
    read = own @ product
    free = (own.square().sum() - read.square().sum() / scale).sqrt()
    share = math.sqrt(1 - beta**2) * (shared.square().sum() / scale * (hidden / channels)).sqrt() / free
    return torch.addmm(own, beta * shared - share * read, product.T, beta=share.item(), alpha=1 / scale.item())
