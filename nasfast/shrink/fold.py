"""BatchNorms in the weights of the layers before them, so that a captured network passes less often over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from nasfast.shrink.channels import Layer
from nasfast.shrink.graph import Program, Values, channels_last


class Folded:
    """The layers of a network that have their BatchNorm in their weights.

    Attributes:
        changes: what `Program.run` replaces for that.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.changes: Values = {}
        self._affine: dict[fx.Node, tuple[Tensor, Tensor, Tensor]] = {}
        for node in program.nodes:
            layer = Layer.of(node, program, model)
            if layer is None or layer.norm is None:
                continue
            module: Any = model.get_submodule(layer.path)
            norm: Any = model.get_submodule(layer.norm.path)
            scale = (norm.running_var + norm.eps).rsqrt()
            scale = scale if norm.weight is None else norm.weight.detach() * scale
            shift = -norm.running_mean * scale
            shift = shift if norm.bias is None else norm.bias.detach() + shift
            bias = torch.zeros_like(shift) if module.bias is None else module.bias.detach()
            self._affine[node] = scale, shift, bias
            self.changes |= {node: self.layer(node, module.weight.detach(), 0.0), layer.norm.node: node}

    def layer(self, node: fx.Node, weight: Tensor, extra: Tensor | float) -> tuple[Tensor, Tensor | float]:
        """The weight of a layer, and what is added to its outputs, with the BatchNorm behind it if it has one."""
        if node not in self._affine:
            return weight, extra
        scale, shift, bias = self._affine[node]
        scaled = channels_last(weight * scale.view(-1, *[1] * (weight.dim() - 1)))
        return scaled, torch.addcmul(shift - bias, scale, bias + extra)
