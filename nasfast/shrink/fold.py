"""BatchNorms in the weights of the layers before them, so that a captured network passes less often over memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from nasfast.shrink.channels import Layer
from nasfast.shrink.graph import Program, Values, channels_last


class Folded:
    """The layers of a network that have their BatchNorm in their weights.

    All is read from the calls, in float64, and rounded once.

    Attributes:
        changes: what `Program.run` replaces for that.

    Args:
        program: the captured network.
        model: the network.
        tensors: its parameters and buffers, from `Program.tensors`.
    """

    def __init__(self, program: Program, model: nn.Module, tensors: Values) -> None:
        self.changes: Values = {}
        self._affine: dict[fx.Node, tuple[Tensor, Tensor, Tensor | float]] = {}

        def value(argument: Any, default: float) -> Any:
            return tensors[argument].double() if isinstance(argument, fx.Node) else default

        for node in program.nodes:
            layer = Layer.of(node, program, model)
            if layer is None or layer.norm is None:
                continue
            weight, bias, mean, variance = layer.norm.node.args[1:5]
            eps: Any = layer.norm.node.args[7]
            scale = value(weight, 1.0) * (value(variance, 1.0) + eps).rsqrt()
            shift = value(bias, 0.0) - value(mean, 0.0) * scale
            self._affine[node] = scale, shift, value(node.args[2] if len(node.args) > 2 else None, 0.0)
            whole: Any = tensors[node.args[1]]  # type: ignore[index]
            self.changes |= {node: self.layer(node, whole, 0.0), layer.norm.node: node}

    def layer(self, node: fx.Node, weight: Tensor, extra: Tensor | float) -> tuple[Tensor, Tensor | float]:
        """The weight of a layer, and what is added to its outputs, with the BatchNorm behind it if it has one."""
        if node not in self._affine:
            return weight, extra
        scale, shift, bias = self._affine[node]
        scaled = channels_last(weight.double() * scale.view(-1, *[1] * (weight.dim() - 1)))
        # `Program.run` adds the bias of the call
        return scaled.to(weight.dtype), (scale * (bias + extra) + shift - bias).to(weight.dtype)
