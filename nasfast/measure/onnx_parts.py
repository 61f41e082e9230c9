"""The parts of networks as ONNX graphs of one export, and networks that are put together from them.

An export takes seconds even for one convolution, and a network of 60 convolutions a quarter of a minute. A network is
its parts in a row, so its file can be made of theirs. No other module needs it, because one network is exported whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nasfast.runtime.onnx import INPUT, OUTPUT, write_onnx

if TYPE_CHECKING:
    import onnx

Shape = tuple[int, int, int]
"""(C, H, W) of a part's input."""


class OnnxPart(NamedTuple):
    """What a part needs of the file of all parts.

    Attributes:
        model: that file, with the graph of every part and the weights that they share.
        nodes: the part's own nodes, in an order in which they can run.
        number: of the part, which is in the names of its input and output.
    """

    model: onnx.ModelProto
    nodes: list[onnx.NodeProto]
    number: int


class _SideBySide(nn.Module):
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part, x in zip(self.parts, images, strict=True))


@torch.no_grad()
def export_parts(modules: Mapping[str, tuple[nn.Module, Shape]]) -> dict[str, OnnxPart]:
    """The graphs of modules, in eval mode on the CPU, by their names."""
    import onnx

    images = [torch.zeros(4, *shape) for _, shape in modules.values()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parts.onnx"
        write_onnx(_SideBySide([module for module, _ in modules.values()]).eval(), images, path)
        model = onnx.load_model_from_string(path.read_bytes())
    makers = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    parts = {}
    for number, name in enumerate(modules):
        wanted, mine = [f"{OUTPUT}{number}"], set[int]()
        while wanted:
            i = makers.get(wanted.pop())
            if i is not None and i not in mine:
                mine.add(i)
                wanted += model.graph.node[i].input
        parts[name] = OnnxPart(model, [model.graph.node[i] for i in sorted(mine)], number)
    return parts


def join_parts(parts: Sequence[OnnxPart]) -> bytes:
    """The file of a network in which each part takes the result of the one before; each has weights of its own."""
    import onnx

    model = parts[0].model
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    values = {value.name: value for value in (*model.graph.input, *model.graph.output)}
    joined = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph, result = joined.graph, INPUT
    graph.name = "network"
    for place, part in enumerate(parts):
        names = {f"{INPUT}{part.number}": result}
        result = OUTPUT if place == len(parts) - 1 else f"{place}/{OUTPUT}"
        names[f"{OUTPUT}{part.number}"] = result
        for node in part.nodes:
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.name = f"{place}/{node.name}"
            for ends in (copy.input, copy.output):
                for i, name in enumerate(ends):
                    if name in weights and name not in names:
                        graph.initializer.add().CopyFrom(weights[name])
                        graph.initializer[-1].name = f"{place}/{name}"
                    # an input that is left out has no name
                    ends[i] = names.setdefault(name, f"{place}/{name}" if name else "")
    for value, name, part in ((graph.input.add(), INPUT, parts[0]), (graph.output.add(), OUTPUT, parts[-1])):
        value.CopyFrom(values[f"{name}{part.number}"])
        value.name = name
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return joined.SerializeToString()
