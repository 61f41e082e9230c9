"""BatchNorms in the weights of the layers before them, so that a captured network passes less often over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

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
        # bias of a layer; mean, variance, epsilon, weight and bias of its norm
        self._norms: dict[fx.Node, tuple[Any, ...]] = {}

        def value(argument: Any) -> Any:
            return tensors[argument].double() if isinstance(argument, fx.Node) else None

        for node in program.nodes:
            layer = Layer.of(node, program, model)
            if layer is None or layer.norm is None:
                continue
            weight, bias, mean, variance = map(value, layer.norm.node.args[1:5])
            own = value(node.args[2]) if len(node.args) > 2 else None
            own = torch.zeros_like(mean) if own is None else own
            self._norms[node] = own, mean, variance, layer.norm.node.args[7], weight, bias
            whole: Any = tensors[node.args[1]]  # type: ignore[index]
            self.changes |= {node: self.layer(node, whole, 0.0), layer.norm.node: node}

    def layer(self, node: fx.Node, weight: Tensor, extra: Tensor | float) -> tuple[Tensor, Tensor | float]:
        """The weight of a layer, and what is added to its outputs, with the BatchNorm behind it if it has one."""
        if node not in self._norms:
            return weight, extra
        bias, *norm = self._norms[node]
        folded, shift = fuse_conv_bn_weights(weight.detach().double(), bias + extra, *norm)
        # `Program.run` adds the bias of the call
        return channels_last(folded.detach().to(weight.dtype)), (shift.detach() - bias).to(weight.dtype)
