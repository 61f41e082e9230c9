"""Zero-cost scores of the literature, and `log_volume`, which is ours; `az_nas` has three more.

Each is `score(module, images, labels) -> float`: `module` maps images (N, C, H, W) on its device to logits (N, classes)
and is not changed, `labels` are (N,) int64. Weighted layers are the convolutions and linear layers whose weights train.
Norms use the batch's statistics. A score raises ScoreError where there is none, and names the layer in which a value is
not finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast.indicators.registry import ScoreError
from nasfast.research.nasi.score import score as nasi_score

WeightedLayer = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear


def working_copy(module: nn.Module) -> nn.Module:
    """A deep copy in training mode, so that norms use the batch's statistics; dropout is off, because it is random.

    Scores change only the copy, so the module keeps its weights, running statistics, gradients and mode.
    """
    copied = copy.deepcopy(module).train()
    for child in copied.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) or type(child).__name__ in ("StochasticDepth", "DropPath"):
            child.eval()
    return copied


def weighted_layers(module: nn.Module) -> dict[str, WeightedLayer]:
    """The convolutions and linear layers whose weights train, by name, in the order of `named_modules`.

    Raises:
        ScoreError: none of them is a convolution.
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, kinds) and m.weight.requires_grad}
    if not any(not isinstance(layer, nn.Linear) for layer in layers.values()):
        total = sum(isinstance(m, kinds[:3]) for m in module.modules())
        raise ScoreError(
            f"none of the {total} convolutions of this {type(module).__name__} has a weight that trains: "
            "set requires_grad=True on the weights that the score should count"
        )
    return layers


def weight_gradients(module: nn.Module, images: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The weight of each weighted layer, and its gradient of the batch's mean cross entropy; 0 without influence.

    Raises:
        ScoreError: no convolution weight trains, or a gradient is not finite; the text names the layer.
    """
    copied = working_copy(module)
    layers = weighted_layers(copied)
    weights = [layer.weight for layer in layers.values()]
    gradients = torch.autograd.grad(F.cross_entropy(copied(images), labels), weights, materialize_grads=True)
    for name, gradient in zip(layers, gradients, strict=True):
        if not gradient.isfinite().all():
            raise not_finite(copied, images, f"gradient of layer {name!r}")
    return [(weight.detach(), gradient) for weight, gradient in zip(weights, gradients, strict=True)]


@torch.no_grad()
def not_finite(module: nn.Module, images: Tensor, what: str) -> ScoreError:
    """The error that says where the first value that is not finite comes from.

    One such value in the forward pass makes the gradients of all layers wrong. So the forward pass runs again, and the
    text names the first layer whose weight or output is not finite. If all are finite, the backward pass or a sum has
    overflowed.
    """
    origins: list[str] = []

    def look(name: str, layer: nn.Module, output: Any) -> None:
        for part, value in (("weight", getattr(layer, "weight", None)), ("output", output)):
            if isinstance(value, Tensor) and not value.isfinite().all():
                origins.append(f"the {part} of layer {name!r} is not finite")

    hooks = [
        child.register_forward_hook(lambda layer, _inputs, output, name=name: look(name, layer, output))
        for name, child in module.named_modules()
        if not any(child.children())
    ]
    module(images)
    for hook in hooks:
        hook.remove()
    where = origins[0] if origins else f"the {what} is not finite, though weights and outputs of all layers are"
    return ScoreError(f"this {type(module).__name__} has no finite score: {where}")


def gradient_norm(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Sum over layers l of ||dL/dW_l||_2, where L is the mean cross entropy of the batch.

    Abdelfattah et al., Zero-Cost Proxies for Lightweight NAS (ICLR 2021, arXiv 2101.08134), section 3.1. Layers are the
    convolutions and linear layers whose weights train.
    """
    return sum(gradient.double().norm().item() for _, gradient in weight_gradients(module, images, labels))


def snip(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Sum over weights w of |w dL/dw|, where L is the mean cross entropy of the batch.

    The saliency of one connection is equation 6 of Lee et al., SNIP (ICLR 2019, arXiv 1810.02340), without its
    normalisation; the sum over a network is from Abdelfattah et al. (arXiv 2101.08134), section 3.2. The sum is over
    the weights of convolutions and linear layers that train.
    """
    pairs = weight_gradients(module, images, labels)
    return sum(((weight * gradient).double().abs().sum().item() for weight, gradient in pairs), 0.0)


def zico(module: nn.Module, images: Tensor, labels: Tensor, *, batches: int = 2) -> float:
    """Sum over layers of log(sum over weights w of mean |dL_i/dw| / std dL_i/dw), where i are the batches.

    Li et al., ZiCo: Zero-shot NAS via Inverse Coefficient of Variation on Gradients (ICLR 2023, arXiv 2301.11300),
    section 3.3. The paper prints the variance of |dL_i/dw|; the released code and this function take that of dL_i/dw,
    because the former is 0 for two batches whose gradients differ only in sign. The variance is divided by the number
    of batches. As in the code, weights whose gradient does not vary are left out, and so is a layer that has no others.
    Layers are the convolutions and linear layers whose weights train.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device; split in order into `batches` of equal size.
        labels: (N,) int64.
        batches: at least 2; the released code uses 2.

    Raises:
        ValueError: fewer than 2 batches, or N is no multiple of them.
        ScoreError: no convolution weight trains, a gradient is not finite (the text names the layer), or no gradient
            varies.
    """
    if batches < 2 or len(images) % batches:
        raise ValueError(f"zico needs at least 2 batches of equal size, got {len(images)} images in {batches} batches")
    pairs = zip(images.chunk(batches), labels.chunk(batches), strict=True)
    by_batch = [weight_gradients(module, x, y) for x, y in pairs]
    logs = []
    for of_layer in zip(*by_batch, strict=True):
        stacked = torch.stack([gradient for _, gradient in of_layer]).double()
        deviation = stacked.std(0, correction=0)
        varies = deviation > 0
        total = (stacked.abs().mean(0)[varies] / deviation[varies]).sum().item()
        if total > 0:
            logs.append(math.log(total))
    if not logs:
        raise ScoreError("no gradient differs between the batches: give batches of different images")
    return math.fsum(logs)


def beta_norm(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Sum over BatchNorms of ||dL/dbeta||_2, where L is the mean cross entropy of the batch."""
    copied = working_copy(module)
    norms = [m for m in copied.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.bias is not None]
    if not norms:
        raise ScoreError(f"no BatchNorm of this {type(module).__name__} has a shift: build it with affine norms")
    shifts = [norm.bias.requires_grad_() for norm in norms]
    loss = F.cross_entropy(copied(images), labels)
    gradients = torch.autograd.grad(loss, shifts, materialize_grads=True)
    if not all(gradient.isfinite().all() for gradient in gradients):
        raise not_finite(copied, images, "gradient of a BatchNorm's shift")
    return sum(gradient.double().norm().item() for gradient in gradients)


def ntk_q(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """||dL/dtheta||^2, where L is the mean cross entropy of the batch and theta are all parameters that train.

    Shu et al., NASI (ICLR 2022, arXiv 2109.00817), section 3.2; see docs/nasi.md. `gradient_norm` sums the norms of
    layers; this is the square of one norm over all parameters, scales and shifts of norm layers included. Norm layers
    use the batch's statistics.
    """
    copied = working_copy(module)
    if not any(p.requires_grad for p in copied.parameters()):
        raise ScoreError(f"no parameter of this {type(module).__name__} trains: set requires_grad=True on some")
    value = nasi_score(copied, images, labels)
    if not math.isfinite(value):
        raise not_finite(copied, images, "squared norm of the gradient")
    return value


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


class _NoCap(TorchFunctionMode):
    """Runs ReLU6 as ReLU, because sums of absolute weights are far above 6 and the cap would stop the flow."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (F.relu6, F.hardtanh):
            return F.relu(args[0])
        return func(*args, **(kwargs or {}))


def synflow(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Sum over weights w of |w dR/dw|, where R is the sum of the logits of one image of ones.

    All parameters are replaced by their absolute values. Tanaka et al., Pruning neural networks without any data by
    iteratively conserving synaptic flow (NeurIPS 2020, arXiv 2006.05467), equation 2; the sum over a network is from
    Abdelfattah et al. (arXiv 2101.08134), section 3.2. As in their code, it is computed in double precision, and norms
    are replaced by the identity, because a norm would divide the flow by its own size. ReLU6 runs as ReLU. The sum is
    over the weights of convolutions and linear layers that train.

    Args:
        module: images -> logits (N, classes).
        images: (N, C, H, W), on the module's device; only its shape C, H, W is used.
        labels: not used.
    """
    copied = working_copy(module).double()
    layers = weighted_layers(copied)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.abs_()
    norms = [child for child in copied.modules() if isinstance(child, _NORMS)]
    replaced: list[nn.Module] = []

    def identity(norm: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        replaced.append(norm)
        return inputs[0]

    for norm in norms:
        norm.register_forward_hook(identity)
    ones = torch.ones((1, *images.shape[1:]), dtype=torch.float64, device=images.device)
    with _NoCap():
        flow = copied.eval()(ones).sum()
        if norms and not replaced:
            raise ScoreError(
                f"the norms of this {type(module).__name__} run inside fused operators, where SynFlow cannot replace "
                "them: build the network with fused=False"
            )
        weights = [layer.weight for layer in layers.values()]
        gradients = torch.autograd.grad(flow, weights, materialize_grads=True)
        flows = [(w.detach() * g).abs().sum().item() for w, g in zip(weights, gradients, strict=True)]
        for name, value in zip(layers, flows, strict=True):
            if not math.isfinite(value):
                raise not_finite(copied, ones, f"flow through layer {name!r}")
    return math.fsum(flows)


_RELU = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
_CLIPPED = (torch.ops.aten.hardtanh.default, torch.ops.aten.hardtanh_.default)
_LIMITS = (-1.0, 1.0)


class _Codes(TorchDispatchMode):
    """Counts, for every pair of images, the units of all ReLUs that are in the same linear region.

    It intercepts operators, so a functional ReLU counts like a module.
    """

    def __init__(self, images: int) -> None:
        super().__init__()
        self.agreements = torch.zeros(images, images, dtype=torch.float64)
        self.units = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _RELU:
            self._count(args[0] > 0)
        elif func in _CLIPPED:
            low, high = args[1:] + _LIMITS[len(args) - 1 :]
            self._count(args[0] <= low, (args[0] > low) & (args[0] < high), args[0] >= high)
        return func(*args, **(kwargs or {}))

    def _count(self, *regions: Tensor) -> None:
        """Count the units of one ReLU by masks of its regions; a single mask also stands for its complement."""
        masks = regions if len(regions) > 1 else (regions[0], ~regions[0])
        for mask in masks:
            code = mask.flatten(1).float()
            # sums of fewer than 2^24 ones are exact in float32
            self.agreements += (code @ code.T).double().cpu()
        self.units += masks[0].flatten(1).shape[1]


def naswot(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """log |det K|, where K_ij is the number of ReLU units that are in the same linear region for images i and j.

    Mellor et al., Neural Architecture Search without Training (ICML 2021, arXiv 2006.04647), equations 1 and 2: K_ij is
    the number of units minus the Hamming distance of the images' binary codes. A ReLU has two regions, off and on. A
    ReLU6 (any hardtanh) has three: below, within and above its limits; a binary code would count the last two as one.
    The paper compares networks on one batch of 128 images.

    Args:
        module: images -> logits; its ReLUs may be modules or functions, but not inside fused operators.
        images: (N, C, H, W), on the module's device, N at least 2.
        labels: not used.

    Raises:
        ScoreError: there are fewer than two images, no ReLU ran, or K is singular because two images have the same
            code.
    """
    if len(images) < 2:
        raise ScoreError(f"naswot compares images, and got {len(images)}: give at least 2")
    copied = working_copy(module)
    codes = _Codes(len(images))
    with torch.no_grad(), codes:
        copied(images)
    if not codes.units:
        raise ScoreError(
            f"no ReLU or ReLU6 ran in this {type(module).__name__}, and NASWOT counts their linear regions. A network "
            "with another activation has no such score; one built with fused=True must be built without"
        )
    sign, value = torch.linalg.slogdet(codes.agreements)
    if sign <= 0 or not value.isfinite():
        raise ScoreError(
            f"the kernel of {len(images)} images and {codes.units:,} ReLU units is singular: images are equal, or no "
            "ReLU of the network distinguishes them; give different images"
        )
    return value.item()


_SHARE_FLOOR = 1e-6
"""Added to each share, because the Gram matrix of single-precision maps has no smaller eigenvalues."""


def log_volume(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Mean over i of log(1e-6 + s_i), with s the eigenvalues of the images' Gram matrix divided by their sum.

    The maps are those that enter the last BatchNorm that runs; row n of F is image n's map, minus the mean over images,
    and the Gram matrix is F F^T. Its N - 1 eigenvalues are all equal, and the score is highest, where the network keeps
    all images equally far apart, as an isometry of well spread images does. Where the maps of all images become alike
    but for a few directions, as in deep plain networks and behind repeated pooling, the score is low. Without the floor
    it would be the logarithm of the volume that the images span, up to scale. It
    needs no labels and no gradient.

    Args:
        module: images -> logits, with BatchNorms that are modules.
        images: (N, C, H, W), on the module's device, N at least 3.
        labels: not used.

    Raises:
        ScoreError: there are fewer than three images, no BatchNorm ran, its input is not finite, or it is the same for
            all images.
    """
    if len(images) < 3:
        raise ScoreError(
            f"log_volume needs at least 3 images, got {len(images)}: two have one eigenvalue, and its share is 1 for "
            "every network"
        )
    copied = working_copy(module)
    maps: list[Tensor] = []

    def keep(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        maps[:] = [inputs[0]]

    for child in copied.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.register_forward_pre_hook(keep)
    with torch.no_grad():
        copied(images)
    if not maps:
        raise ScoreError(
            f"no BatchNorm module ran in this {type(module).__name__}, and the score takes the maps that enter the "
            "last one: a network with another norm has no such score; one built with fused=True must be built without"
        )
    flat = maps[0].flatten(1).double()
    if not flat.isfinite().all():
        raise not_finite(copied, images, "input of the last BatchNorm")
    flat = flat - flat.mean(0)
    # the mean is subtracted, so the least of the N eigenvalues is 0
    values = torch.linalg.eigvalsh(flat @ flat.T)[1:].clamp(min=0)
    total = values.sum()
    if total <= _SHARE_FLOOR**2 * flat.numel():
        raise ScoreError(f"all {len(images)} images have the same map before the last BatchNorm: they span no volume")
    return (values / total + _SHARE_FLOOR).log().mean().item()
