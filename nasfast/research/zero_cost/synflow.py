"""SynFlow: the flow through the network of absolute weights; it needs neither labels nor images."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nasfast.indicators.registry import ScoreError
from nasfast.research.zero_cost.layers import not_finite, weighted_layers, working_copy

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

    Raises:
        ScoreError: no convolution weight trains, norms run inside fused operators, or a flow is not finite (the text
            names the layer).
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
