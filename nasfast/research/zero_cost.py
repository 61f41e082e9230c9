"""Scores of untrained networks, mostly from the literature, which need one or a few batches and no training.

Each is `score(module, images, labels) -> float`: `module` maps images (N, C, H, W) on its device to logits (N, classes)
and is not changed, `labels` are (N,) int64. Weighted layers are the convolutions and linear layers whose weights train.
Norms use the batch's statistics. A score raises ScoreError where there is none, and names the layer in which a value is
not finite. The papers say that a larger value predicts a higher accuracy; docs/ranking_zero_cost.md says how well that
holds here.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nasfast.indicators.isometry import largest_singular_value, mean_channel_jacobian, random_signs
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
    """The convolutions and linear layers whose weights train, by name; at least one of them is a convolution."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, kinds) and m.weight.requires_grad}
    if not any(not isinstance(layer, nn.Linear) for layer in layers.values()):
        total = sum(isinstance(m, kinds[:3]) for m in module.modules())
        raise ScoreError(
            f"none of the {total} convolutions of this {type(module).__name__} has a weight that trains: "
            "set requires_grad=True on the weights that the score should count"
        )
    return layers


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


def ntk_q(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """||dL/dtheta||^2, where L is the mean cross entropy of the batch and theta are all parameters that train.

    Shu et al., NASI (ICLR 2022, arXiv 2109.00817), section 3.2; see docs/nasi.md. Scales and shifts of norm
    layers are included, and norm layers use the batch's statistics.
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
    over the weights of convolutions and linear layers that train. Of the images only the shape C, H, W is used.
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
    The paper compares networks on one batch of 128 images. ReLUs may be modules or functions, but not inside fused
    operators.
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


_JACOV_FLOOR = 1e-5
"""Added to the eigenvalues in `jacov`, as in the released code."""


def jacov(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """-sum over i of log(v_i + k) + 1 / (v_i + k), with v the eigenvalues of a correlation matrix and k = 1e-5.

    Row n of the correlated matrix is the gradient of the sum of the logits of image n by its pixels. The score is high
    where a network tells the images apart. Mellor et al., Neural Architecture Search without Training (arXiv
    2006.04647v1, section 3); the name is that of Abdelfattah et al. (arXiv 2101.08134), section 3.2.
    """
    if len(images) < 2:
        raise ScoreError(f"jacov correlates images, and got {len(images)}: give at least 2")
    copied, inputs = working_copy(module), images.detach().clone().requires_grad_()
    (rows,) = torch.autograd.grad(copied(inputs).sum(), inputs, materialize_grads=True)
    rows = rows.flatten(1).double()
    if not rows.isfinite().all():
        raise not_finite(copied, images, "gradient by the images")
    centred = rows - rows.mean(1, keepdim=True)
    norms = centred.norm(dim=1, keepdim=True)
    if not norms.all():
        raise ScoreError(f"the logits of this {type(module).__name__} do not depend on the pixels of some image")
    unit = centred / norms
    values = torch.linalg.eigvalsh(unit @ unit.T).clamp(min=0) + _JACOV_FLOOR
    return -(values.log() + 1 / values).sum().item()


_FISHER_SHARE = 0.05
"""Share of the uniform distribution in the predictions of `vkdnw`, as in the released code."""


def vkdnw(module: nn.Module, images: Tensor, labels: Tensor | None = None, *, seed: int = 0) -> float:
    """Number of parameter tensors plus the entropy of nine quantiles of the Fisher information's eigenvalues.

    The Fisher information is that of one weight of each parameter tensor, the first: the mean over images of
    J^T (diag p - p p^T) J, where J is the Jacobian of the logits and p the predictions, 5 % of which are uniform. With
    q_k the eigenvalues' quantiles at 10 %, 20 %, ..., 90 % divided by their sum, the entropy is -sum q_k log q_k, so it
    is at most log 9 and orders networks of equally many tensors. Tybl and Neumann, Training-free Neural Architecture
    Search through Variance of Knowledge of Deep Network Weights (CVPR 2025, arXiv 2502.04975), equations 8 to 12. As in
    the released code, weights are drawn anew, from He's normal distribution (fan-in, by `seed`), and norms use their
    running statistics, which are 0 and 1 before training. The paper's aggregate (equation 15) is the sum
    `vkdnw+jacov+expressivity+trainability+macs`.
    """
    copied = working_copy(module).eval()
    generator = torch.Generator().manual_seed(seed)
    for layer in weighted_layers(copied).values():
        deviation = math.sqrt(2 / layer.weight[0].numel())
        layer.weight.data.copy_(deviation * torch.randn(layer.weight.shape, generator=generator))
    tensors = sum(p.requires_grad for p in copied.parameters())
    jacobian, logits = first_weight_jacobian(copied, images)
    uniform = 1 / logits.shape[1]
    p = (1 - _FISHER_SHARE) * logits.softmax(1) + _FISHER_SHARE * uniform
    covariance = p.diag_embed() - p[:, :, None] * p[:, None, :]
    fisher = torch.einsum("nkp,nkl,nlq->pq", jacobian, covariance, jacobian) / len(images)
    if not fisher.isfinite().all():
        raise not_finite(copied, images, "Jacobian of the logits")
    levels = torch.arange(1, 10, dtype=torch.float64, device=fisher.device) / 10
    quantiles = torch.linalg.eigvalsh(fisher).clamp(min=0).quantile(levels)
    if not quantiles.any():
        raise ScoreError(f"nine tenths of the Fisher information's eigenvalues of this {type(module).__name__} are 0")
    shares = quantiles / quantiles.sum()
    return tensors + torch.special.entr(shares).sum().item()


def first_weight_jacobian(module: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Jacobians (N, classes, tensors) of the logits by the first weight of each parameter tensor, and the logits.

    Both are in double precision. One backward pass per class gives the gradients by the layers' outputs, and the first
    weight's gradient of one image is the sum over pixels of the output's gradient times what the weight multiplies.
    The module treats images one by one; layers are convolutions that pad with zeros, linear layers and BatchNorms.
    """
    outputs: list[Tensor] = []
    factors: list[list[Tensor]] = []

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not output.requires_grad:  # a layer before which nothing trains
            output = output.requires_grad_()
        outputs.append(output)
        factors.append([f.detach() for f in _first_factors(layer, inputs[0], output)])
        return output.clone()  # what follows may work in place

    layers = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    for layer in layers:
        layer.register_forward_hook(hook)
    logits = module(images)
    rows = []
    for k in range(logits.shape[1]):
        gradients = torch.autograd.grad(logits[:, k].sum(), outputs, retain_graph=True, materialize_grads=True)
        pairs = ((g[:, 0], f) for g, group in zip(gradients, factors, strict=True) for f in group)
        rows.append([(g * f).reshape(len(f), -1).sum(1) for g, f in pairs])
    return torch.stack([torch.stack(row, 1) for row in rows], 1).double(), logits.detach().double()


def _first_factors(layer: nn.Module, x: Tensor, output: Tensor) -> list[Tensor]:
    """What the first weight and the first bias of a layer multiply, shaped like the first channel of its output."""
    one = torch.ones_like(output[:, 0])
    if isinstance(layer, nn.Conv2d):
        if layer.padding_mode != "zeros":
            raise ScoreError(
                f"vkdnw knows convolutions that pad with zeros, not padding_mode={layer.padding_mode!r}: take another "
                "score"
            )
        only = torch.zeros_like(layer.weight[:1])
        only[0, 0, 0, 0] = 1
        inputs = x[:, : only.shape[1]]
        factor = F.conv2d(inputs, only, None, layer.stride, layer.padding, layer.dilation)[:, 0]
    elif isinstance(layer, nn.Linear):
        factor = x[:, 0]
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None:
        factor = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)[:, 0]
    else:
        raise ScoreError(f"vkdnw knows Conv2d, Linear and BatchNorms, not {type(layer).__name__}: take another score")
    pairs = ((layer.weight, factor), (layer.bias, one))
    return [value for parameter, value in pairs if parameter is not None and parameter.requires_grad]


_ENTROPY_FLOOR = 1e-8
"""Added to shares in the logarithms of `expressivity`, as in the released code."""


def expressivity(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Sum over block outputs of the entropy of their channels' principal components.

    Lee and Ham, AZ-NAS: Assembling Zero-Cost Proxies for Network Architecture Search (CVPR 2024, arXiv 2403.19232),
    section 3.1. Entropy is -sum p log p, where p are the eigenvalues of the covariance of the channels over images and
    pixels, divided by their sum. The paper computes this score and the next two with normal noise for images; these
    functions take the images that they are given. The module has at least two `blocks`.
    """
    return math.fsum(_entropies(module, images))


def progressivity(module: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """The smallest growth from one block to the next of the entropy that `expressivity` sums up (section 3.2)."""
    entropies = _entropies(module, images)
    return min(b - a for a, b in itertools.pairwise(entropies))


def trainability(module: nn.Module, images: Tensor, labels: Tensor | None = None, *, seed: int = 0) -> float:
    """Mean over blocks of 2 - s - 1 / s, which is 0 where each block's mean channel Jacobian has s = 1 (section 3.3).

    s is the largest singular value, see `nasfast.indicators.isometry`. A block that passes its input on unchanged is
    refused, because it learns nothing; the released code gives it minus infinity. The first of the `blocks` only gives
    the map that the second begins with. `seed` is that of the random signs.
    """
    generator = torch.Generator().manual_seed(seed)
    leaf: Tensor | None = None
    terms: list[float] = []

    def measure(name: str, output: Tensor) -> Tensor:
        nonlocal leaf
        if leaf is not None:
            if output.shape == leaf.shape and torch.equal(output, leaf):
                raise ScoreError(f"block {name!r} passes its input on unchanged, so nothing in it can be trained")
            try:
                signs = random_signs(output, generator)
                s = largest_singular_value(mean_channel_jacobian(leaf, output, signs))
            except ScoreError as error:
                raise ScoreError(f"block {name!r}: {error}") from error
            terms.append(2 - s - 1 / s)
        # a new leaf, so that a product of this block needs no other block's graph
        leaf = output.detach().requires_grad_()
        return leaf.clone()

    _run_blocks(module, images, measure)
    return math.fsum(terms) / len(terms)


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a module by name, of which the first is the stem.

    They are children with convolutions, in a plain `nn.Sequential`, list or dict its elements. A list or dict may also
    have blocks of other modules, such as a cell that only pools. A module that has all its blocks in one child of
    another kind is looked into.
    """

    def collect(parent: nn.Module, prefix: str) -> dict[str, nn.Module]:
        children: dict[str, nn.Module] = {}
        listed = type(parent) in (nn.ModuleList, nn.ModuleDict)
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if type(child) in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
                children |= collect(child, f"{path}.")
            elif any(isinstance(m, nn.Conv2d) for m in child.modules()) or listed and any(child.children()):
                children[path] = child
        return children

    outer = collect(module, "")
    while len(outer) == 1 and not isinstance(child := next(iter(outer.values())), nn.Conv2d):
        inner = collect(child, f"{next(iter(outer))}.")
        if not inner:
            break
        outer = inner
    return outer


def _entropies(module: nn.Module, images: Tensor) -> list[float]:
    """The entropy of the principal components of each block's output, in the order in which blocks run."""
    entropies: list[float] = []

    def measure(name: str, output: Tensor) -> Tensor:
        flat = output.detach().transpose(0, 1).flatten(1).double()
        flat = flat - flat.mean(1, keepdim=True)
        values = torch.linalg.eigvalsh(flat @ flat.T / flat.shape[1]).clamp(min=0)
        if not values.any():
            raise ScoreError(f"block {name!r} has the same output at all pixels of all images")
        shares = values / values.sum()
        entropies.append(-(shares * (shares + _ENTROPY_FLOOR).log()).sum().item())
        return output

    with torch.no_grad():
        _run_blocks(module, images, measure)
    return entropies


def _run_blocks(module: nn.Module, images: Tensor, measure: Callable[[str, Tensor], Tensor]) -> None:
    """Run a copy in at least single precision; `measure` gets name and output of each block, and replaces it."""
    copied = working_copy(module)
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in copied.parameters()):
        # sums of half precision over all pixels of a batch would be noise
        copied, images = copied.float(), images.float()
    names: list[str] = []

    def hook(name: str) -> Callable[..., Any]:
        def look(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
            first, rest = (output[0], output[1:]) if isinstance(output, tuple) and output else (output, None)
            if not isinstance(first, Tensor) or first.ndim != 4:
                raise ScoreError(f"block {name!r} must give maps (N, C, H, W), or a tuple that begins with them")
            if not first.isfinite().all():
                raise ScoreError(
                    f"this {type(module).__name__} has no finite score: block {name!r} gives no finite map"
                )
            names.append(name)
            result = measure(name, first)
            return result if rest is None else (result, *rest)

        return look

    for name, block in blocks(copied).items():
        block.register_forward_hook(hook(name))
    copied(images)
    if len(names) < 2:
        raise ScoreError(
            f"this {type(module).__name__} has {len(names)} blocks, and the score compares at least two: give a module "
            "whose children, or elements of nn.Sequential, are blocks with convolutions"
        )


ZERO_COST: dict[str, Callable[[nn.Module, Tensor, Tensor], float]] = {
    score.__name__: score for score in (synflow, naswot, ntk_q, jacov, vkdnw, expressivity, progressivity, trainability)
}
"""Name -> score."""
