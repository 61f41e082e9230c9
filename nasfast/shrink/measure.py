"""What every width and every block of a network is worth, from a few hundred images and without gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from nasfast.indicators.table import IndicatorTable
from nasfast.ops.threads import on_threads
from nasfast.runtime.arguments import check_type
from nasfast.shrink.channels import Dimension, Layer
from nasfast.shrink.eliminate import eliminate, solve
from nasfast.shrink.find import Found
from nasfast.shrink.fold import Folded
from nasfast.shrink.graph import ShrinkError, Values, channels_last

_PIXELS = 64
"""Output pixels of a convolution, per image, at which its inputs are seen."""

_FACTORS, _BISECTIONS = (1 / 16, 16.0), 50
"""The factors of logits that are tried, and steps of the bisection between them."""

_CONSTANT = 1e-6, 1e-10
"""Shares of the mean variance and of the mean square, below whose sum an input counts as constant."""

_COLUMNS_PER_SAMPLE = 16
"""Most inputs of a layer for each sample of them; with more, the ridge leaves the weights as they were."""


@dataclass(frozen=True)
class Solution:
    """A dimension at one width.

    Attributes:
        kept: units that stay, ascending.
        weights: path of a layer that reads the dimension -> (outputs, kept columns) its weights as a matrix, fp32.
        biases: path of such a layer -> (outputs,) what is added to its outputs, fp32.
    """

    kept: Tensor
    weights: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]


@dataclass(frozen=True)
class Measured:
    """What `measure` measured.

    Attributes:
        found: what was measured.
        table: for `nasfast.search_table` and `nasfast.search.pareto_front`: minus the KL divergence, in nats per image,
            of every candidate; where a choice has two widths, their sum.
        solutions: for each choice and dimension, width -> its weights.
    """

    found: Found
    table: IndicatorTable
    solutions: tuple[tuple[dict[int, Solution], ...], ...]


def measure(
    found: Found,
    images: Tensor,
    *,
    score_images: int = 128,
    ridge: float = 1e-2,
    batch: int = 32,
    seed: int = 0,
) -> Measured:
    """Measure a network's choices on images without labels; no gradient is computed.

    For each layer that reads a hidden dimension, the covariance of its inputs gives a nested order of channels
    (`nasfast.shrink.eliminate`), and for each width the least-squares weights of the kept ones, with the change of the
    mean as a bias. The score of a candidate is minus the KL divergence of the network's outputs to those with this one
    candidate, with the rest as it is. Matrices are summed in float64 and solved in float64.

    Args:
        found: from `find`.
        images: (N, channels, height, width) of the size that `find` saw, prepared as for the network; a few hundred.
        score_images: how many of these, from the start, give the KL divergences.
        ridge: share of each input's variance that is added to it. The layer's first weights are what it draws to. The
            number of columns / number of samples is added to it.
        batch: images at a time.
        seed: seed of the pixels at which inputs of convolutions are seen.

    Raises:
        TypeError: found is something else.
        ShrinkError: images of another size or fewer than the layers' inputs need.
    """
    check_type("found", found, Found, advice="nasfast.shrink.find(model, images) makes one")
    check_images(found, images)
    needed, why = least_images(found)
    if needed > len(images):
        raise ShrinkError(f"{why}, of which {len(images)} images show too few values: give at least {needed} images")
    if score_images < 1 or not ridge > 0:
        raise ShrinkError(f"score_images and ridge must be positive, got {score_images} and {ridge}")
    with torch.no_grad():
        inputs = _see_inputs(found, images, batch, seed)
        solutions = _solve(found, inputs, ridge)
        losses = _score(found, solutions, images[:score_images], batch)
    rows: list[dict[int, float]] = []
    for place, loss in zip(found.places, losses, strict=True):
        row = {}
        for value, kept in enumerate(place.candidates):
            parts = ["drop"] if kept is None else list(enumerate(kept))
            row[value] = -sum(loss[part] for part in parts)
        rows.append(row)
    meta = {"score": "KL divergence", "images": len(images), "score_images": min(score_images, len(images))}
    return Measured(found, IndicatorTable.from_rows(found.space, rows, meta), solutions)


def least_images(found: Found) -> tuple[int, str]:
    """The number of images that `measure` needs at least, and why: "LAYER has N inputs"."""
    readers = [layer for place in found.places for d in place.dimensions for layer in d.readers]
    # a layer is seen at as many pixels of each image as `_Inputs` chooses
    needed = [
        (math.ceil(layer.columns / (_COLUMNS_PER_SAMPLE * min(_PIXELS, layer.pixels))), layer) for layer in readers
    ]
    if not needed:  # blocks may be dropped, and no width is searched
        return 1, "the network has inputs"
    number, layer = max(needed, key=lambda pair: pair[0])
    return number, f"{layer.path} has {layer.columns} inputs"


def check_images(found: Found, images: Tensor) -> None:
    """Refuse images of another form than those that the network was captured with."""
    expected = tuple(found.program.image.meta["val"].shape[1:])
    if not isinstance(images, Tensor) or images.dim() != 4 or tuple(images.shape[1:]) != expected or not len(images):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ShrinkError(
            f"images must be (N, {', '.join(map(str, expected))}), got {got}: call find again for another size"
        )
    if images.dtype != (seen := found.program.image.meta["val"].dtype):
        raise ShrinkError(f"images are {images.dtype}, and find saw {seen}: give both as the network takes them")


class _Inputs:
    """Mean and covariance of the inputs of a layer, summed over batches."""

    def __init__(self, layer: Layer, module: nn.Module, seed: int) -> None:
        self._layer, self._module = layer, module
        size = layer.columns
        self._sum = torch.zeros(size, dtype=torch.float64)
        self._products = torch.zeros(size, size, dtype=torch.float64)
        self.samples = 0
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: Tensor) -> None:
        rows = self._rows(x)
        total = rows.sum(0, dtype=torch.float64).cpu()
        self.samples += len(rows)
        self._sum += total
        # centred rows lose no digits in fp32
        shift = (self._sum / self.samples).to(rows.dtype).double()
        centred = rows - shift.to(rows)
        self._products += (centred.T @ centred).cpu().double()
        rest = total - len(rows) * shift
        self._products += torch.outer(rest, shift) + torch.outer(shift, rest) + len(rows) * torch.outer(shift, shift)

    def _rows(self, x: Tensor) -> Tensor:
        """(samples, columns) inputs of some outputs, in the order of the weight's columns."""
        conv = self._module
        if not isinstance(conv, nn.Conv2d):
            return x.reshape(len(x), -1).float()
        (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
        ph, pw = _padding(self._layer.node)
        x = functional.pad(x, (pw, pw, ph, ph))
        height, width = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
        chosen = torch.randperm(height * width, generator=self._generator)[:_PIXELS]
        top, left = chosen // width * sh, chosen % width * sw
        at = (top[:, None, None] + torch.arange(kh)[:, None] * dh, left[:, None, None] + torch.arange(kw) * dw)
        patches = x[:, :, at[0], at[1]]  # (images, channels, pixels, kernel height, kernel width)
        return patches.permute(0, 2, 1, 3, 4).reshape(len(x) * len(chosen), -1).float()

    @property
    def mean(self) -> Tensor:
        """(columns,) float64."""
        return self._sum / self.samples

    @property
    def covariance(self) -> Tensor:
        """(columns, columns) float64."""
        return self._products / self.samples - torch.outer(self.mean, self.mean)


def _padding(node: fx.Node) -> tuple[int, int]:
    """Padding of a convolution's call, where it is not "same"; timm pads before the call."""
    padding: Any = node.args[4] if len(node.args) > 4 else 0
    pair = (padding, padding) if isinstance(padding, int) else (*padding, *padding)[:2]
    return int(pair[0]), int(pair[1])


def _see_inputs(found: Found, images: Tensor, batch: int, seed: int) -> dict[str, _Inputs]:
    readers = [layer for place in found.places for d in place.dimensions for layer in d.readers]
    inputs = {
        layer.path: _Inputs(layer, found.model.get_submodule(layer.path), seed + i) for i, layer in enumerate(readers)
    }
    see = {layer.node: inputs[layer.path] for layer in readers}
    tensors = found.program.tensors(found.model)
    for part in images.split(batch):
        found.program.run(tensors, {found.program.image: channels_last(part)}, see=see)
    return inputs


def _solve(found: Found, inputs: Mapping[str, _Inputs], ridge: float) -> tuple[tuple[dict[int, Solution], ...], ...]:
    """The solutions of all choices; threads share the dimensions, of which most work is outside of Python."""
    for path, seen in inputs.items():
        if not bool(seen.covariance.isfinite().all()):
            raise ShrinkError(f"inputs of {path} are not finite: look at the images, and at the weights")
    dimensions = [(d, widths[:-1]) for p in found.places for d, widths in zip(p.dimensions, p.widths, strict=True)]
    solutions = iter(
        on_threads(
            lambda pair: _solve_dimension(*pair, inputs, found.model, ridge),
            dimensions,
            [float(d.main.columns**3) for d, _ in dimensions],
        )
    )
    return tuple(tuple(next(solutions) for _ in place.dimensions) for place in found.places)


def _solve_dimension(
    dimension: Dimension, widths: tuple[int, ...], inputs: Mapping[str, _Inputs], model: nn.Module, ridge: float
) -> dict[int, Solution]:
    covariances, means, matrices, units = {}, {}, {}, {}
    for layer in dimension.readers:
        seen = inputs[layer.path]
        covariance = seen.covariance
        variance = covariance.diagonal().clamp_min(0)
        # an input that never changes has no variance, but for what rounding leaves of its square, and what it adds
        # belongs to the bias; where none changes, all weights stay
        floor = float(_CONSTANT[0] * variance.mean() + _CONSTANT[1] * seen.mean.square().mean()) or 1.0
        covariance += torch.diag(variance.clamp_min(floor) * (ridge + layer.columns / seen.samples))
        weight: Any = model.get_submodule(layer.path).weight
        covariances[layer.path], means[layer.path] = covariance, seen.mean
        matrices[layer.path] = weight.detach().cpu().double().reshape(layer.rows, -1)
        units[layer.path] = layer.columns // dimension.units
    main = dimension.main
    result = eliminate(
        covariances[main.path],
        matrices[main.path],
        widths,
        unit=units[main.path],
        importance=_importance(main, model),
    )
    solutions = {}
    for width in widths:
        weights, biases = {}, {}
        for path, matrix in matrices.items():
            columns = unit_channels(result.kept[width], units[path])
            best = result.weights[width] if path == main.path else solve(covariances[path], matrix, columns)
            weights[path] = best.float()
            biases[path] = (matrix @ means[path] - best @ means[path][columns]).float()
        solutions[width] = Solution(result.kept[width], weights, biases)
    return solutions


def _importance(layer: Layer, model: nn.Module) -> Tensor | None:
    """Squared factors of the BatchNorm behind a layer, by which errors of its outputs reach the stream."""
    if layer.norm is None:
        return None
    norm: Any = model.get_submodule(layer.norm.path)
    scale = norm.weight.detach().cpu().double().square() if norm.weight is not None else 1.0
    return scale / (norm.running_var.cpu().double() + norm.eps)


def unit_channels(units: Tensor, size: int) -> Tensor:
    """Indices of the channels of units, in the order of the units."""
    return (units[:, None] * size + torch.arange(size)).reshape(-1)


def _score(
    found: Found,
    solutions: tuple[tuple[dict[int, Solution], ...], ...],
    images: Tensor,
    batch: int,
) -> list[dict[Any, float]]:
    """For each choice, the KL divergence that "drop" and each (dimension, width) adds."""
    program, tensors = found.program, found.program.tensors(found.model)
    folded = Folded(program, found.model, tensors)
    trials = [list(_trials(found, p, solutions[p], folded)) for p in range(len(found.places))]
    starts = {start for row in trials for _, start, _ in row}
    live = {start: program.live(start) for start in starts}
    losses: list[dict[Any, float]] = [
        {(i, widths[-1]): 0.0 for i, widths in enumerate(place.widths)} for place in found.places
    ]
    for part in images.split(batch):
        values = {program.image: channels_last(part)}
        logits, kept = program.run(tensors, values, replace=folded.changes, keep=live)
        expected = logits.double().log_softmax(1)
        for row, loss in zip(trials, losses, strict=True):
            for key, start, replace in row:
                got, _ = program.run(tensors, kept[start], start=start, replace={**folded.changes, **replace()})
                loss[key] = loss.get(key, 0.0) + _divergence(expected, got)
    return [{key: value / len(images) for key, value in loss.items()} for loss in losses]


def _divergence(expected: Tensor, logits: Tensor) -> float:
    """KL divergence to log-probabilities, summed over images in float64."""
    return float((expected.exp() * (expected - logits.double().log_softmax(1))).sum())


def _trials(
    found: Found, place_index: int, solutions: tuple[dict[int, Solution], ...], folded: Folded
) -> Iterator[tuple[Any, int, Any]]:
    """Each single change of a place: its key, the first node that it changes, and a function that gives the changes."""
    place, program = found.places[place_index], found.program
    if place.block is not None:
        block = place.block
        yield "drop", program.index(block.addition), lambda: {block.addition: block.shortcut}
    for i, (dimension, row) in enumerate(zip(place.dimensions, solutions, strict=True)):
        start = min(program.index(layer.node) for layer in dimension.readers)
        for width, solution in row.items():

            def replace(d: Dimension = dimension, s: Solution = solution) -> Values:
                return {layer.node: folded.layer(layer.node, *_padded(layer, d, s, found.model)) for layer in d.readers}

            yield (i, width), start, replace


def _padded(layer: Layer, dimension: Dimension, solution: Solution, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The weight of a layer with zeros for what is removed, and what is added to its outputs."""
    weight: Any = model.get_submodule(layer.path).weight
    padded = torch.zeros(layer.rows, layer.columns)
    padded[:, unit_channels(solution.kept, layer.columns // dimension.units)] = solution.weights[layer.path]
    return channels_last(padded.view(weight.shape)).to(weight), solution.biases[layer.path].to(weight)


def divergence(expected: Tensor, logits: Tensor) -> float:
    """KL divergence to the expected logits (N, classes), in nats per image, at the best factor of the logits.

    The factor, of all images together, is that with the least divergence: it changes no prediction, and training or
    the classifier's weights can have it. Without it, smaller images count as worse mostly because they make a network
    too sure (EfficientNet-Lite0 at 160 instead of 224 pixels: 0.64 nats, 0.3 at the best factor).
    """
    target, z = expected.double().softmax(1), logits.double()
    if not bool(torch.isfinite(z).all()):
        return math.inf
    # the divergence is convex in the factor: its slope is 0 at the least
    low, high = _FACTORS
    for _ in range(_BISECTIONS):
        factor = math.sqrt(low * high)
        slope = float((((z * factor).softmax(1) - target) * z).sum())
        low, high = (low, factor) if slope > 0 else (factor, high)
    return _divergence(expected.double().log_softmax(1), z * math.sqrt(low * high)) / len(z)


def label_logits(labels: Tensor, classes: int) -> Tensor:
    """Logits (N, classes) that are sure of the labels (N,), so that `divergence` from them is a cross entropy."""
    return 30.0 * nn.functional.one_hot(labels, classes).double()
