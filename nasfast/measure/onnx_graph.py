"""ONNX of a captured graph in milliseconds, to time it. torch.onnx.export takes half a minute for 50 convolutions.

It knows the functions of convolutional networks in evaluation mode. `torch.onnx.export` writes what is deployed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from nasfast.runtime.onnx import INPUT, OUTPUT

if TYPE_CHECKING:
    import onnx

_OPSET, _IR = 18, 10
_SAME = frozenset("dropout feature_dropout alias detach contiguous clone".split())
_PLAIN = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish", "elu": "Elu"}
_POOLS = {"max_pool2d": "MaxPool", "avg_pool2d": "AveragePool"}
_PAIRS = {"add": "Add", "mul": "Mul", "sub": "Sub", "div": "Div"}

_FIXED = dict.fromkeys(_PLAIN, 1) | dict.fromkeys(_PAIRS, 2)
"""Arguments of functions that have more, as the factor of an addition, which are not translated."""


class UnknownFunction(ValueError):
    """A graph calls a function that `graph_onnx` does not know."""


def graph_onnx(module: fx.GraphModule) -> bytes:
    """The ONNX file of a graph of PyTorch's functions, from one tensor (N, C, H, W) of any size to another.

    Raises:
        UnknownFunction: it calls a function that has no translation here.
    """
    return _Writer(module).write()


class _Writer:
    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, np.ndarray] = {}
        self._names: dict[fx.Node, str] = {}

    def write(self) -> bytes:
        from onnx import TensorProto, helper, numpy_helper

        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._names[node] = INPUT
            elif node.op == "get_attr":
                tensor: Any = getattr(self._module, str(node.target))
                self._names[node] = self._weight(tensor.detach().cpu().float().numpy())
            elif node.op == "call_function":
                self._call(node)
            else:
                self._add("Identity", [self._names[node.args[0]]], OUTPUT)
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *rest])
            for name, rest in ((INPUT, ["channels", "height", "width"]), (OUTPUT, []))
        ]
        ends[1].type.tensor_type.ClearField("shape")
        weights = [numpy_helper.from_array(value, name) for name, value in self._weights.items()]
        graph = helper.make_graph(self._nodes, "network", ends[:1], ends[1:], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
        return bytes(model.SerializeToString())

    def _weight(self, value: np.ndarray) -> str:
        name = f"w{len(self._weights)}"
        self._weights[name] = np.ascontiguousarray(value)
        return name

    def _add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
        from onnx import helper

        self._nodes.append(helper.make_node(kind, inputs, [output], name=f"n{len(self._nodes)}", **attributes))

    def _call(self, node: fx.Node) -> None:
        _, _, overloaded = str(node.target).partition(".")  # of aten.relu_.default
        name = overloaded.partition(".")[0].rstrip("_") or str(node.target)
        method: Callable[..., None] | None = getattr(self, f"_{name}", None)
        output = self._names[node] = f"v{len(self._names)}"
        if name in _FIXED and len(node.args) + len(node.kwargs) > _FIXED[name]:
            raise UnknownFunction(f"{name} with {node.args[1:]} and {node.kwargs} has no translation")
        if name in _SAME:
            self._names[node] = self._names[node.args[0]]  # type: ignore[index]
        elif name in _PLAIN:
            self._add(_PLAIN[name], [self._value(node.args[0])], output)
        elif name in _PAIRS:
            self._add(_PAIRS[name], [self._value(a) for a in node.args[:2]], output)
        elif name in _POOLS:
            self._pool(name, output, *node.args)
        elif name == "sym_size":
            pass
        elif method is None:
            raise UnknownFunction(f"{name} has no translation")
        else:
            method(output, *node.args, **node.kwargs)

    def _value(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self._names[argument]
        return self._weight(np.array(argument, np.float32))

    def _conv2d(self, output: str, x: Any, w: Any, b: Any = None, *rest: Any) -> None:
        given: list[Any] = [*rest, *(1, 0, 1, 1)[len(rest) :]]
        stride, padding, dilation, groups = given
        inputs = [self._value(a) for a in (x, w, b) if a is not None]
        options: dict[str, Any] = {"strides": _pair(stride), "dilations": _pair(dilation), "group": groups}
        if padding == "same":
            options["auto_pad"] = "SAME_UPPER"
        else:
            options["pads"] = [0] * 4 if padding == "valid" else _pair(padding) * 2
        self._add("Conv", inputs, output, **options)

    def _batch_norm(self, output: str, x: Any, w: Any, b: Any, mean: Any, var: Any, *rest: Any) -> None:
        size = self._weights[self._value(mean)].shape
        scale = self._value(w) if w is not None else self._weight(np.ones(size, np.float32))
        shift = self._value(b) if b is not None else self._weight(np.zeros(size, np.float32))
        inputs = [self._value(x), scale, shift, self._value(mean), self._value(var)]
        self._add("BatchNormalization", inputs, output, epsilon=float(rest[2]))

    def _hardtanh(self, output: str, x: Any, low: float = -1.0, high: float = 1.0) -> None:
        self._add("Clip", [self._value(x), self._value(low), self._value(high)], output)

    def _relu6(self, output: str, x: Any) -> None:
        self._hardtanh(output, x, 0.0, 6.0)

    def _clamp(self, output: str, x: Any, low: float | None = None, high: float | None = None) -> None:
        self._hardtanh(output, x, -math.inf if low is None else low, math.inf if high is None else high)

    def _silu(self, output: str, x: Any) -> None:
        self._add("Sigmoid", [self._value(x)], f"{output}s")
        self._add("Mul", [self._value(x), f"{output}s"], output)

    def _hardsigmoid(self, output: str, x: Any) -> None:
        self._add("HardSigmoid", [self._value(x)], output, alpha=1 / 6, beta=0.5)

    def _mean(self, output: str, x: Any, axes: Any, keepdim: bool = False, **_: Any) -> None:
        inputs = [self._value(x), self._weight(np.array(axes, np.int64))]
        self._add("ReduceMean", inputs, output, keepdims=int(keepdim))

    def _adaptive_avg_pool2d(self, output: str, x: Any, size: Any) -> None:
        if _pair(size) != [1, 1]:
            raise UnknownFunction(f"adaptive_avg_pool2d to {size} has no translation")
        self._add("GlobalAveragePool", [self._value(x)], output)

    def _pool(
        self, name: str, output: str, x: Any, kernel: Any, stride: Any = (), padding: Any = 0, *rest: Any
    ) -> None:
        options: dict[str, Any] = {"kernel_shape": _pair(kernel), "strides": _pair(stride or kernel)}
        options["pads"] = _pair(padding) * 2
        if name == "max_pool2d":
            options |= {"dilations": _pair(rest[0] if rest else 1), "ceil_mode": int(bool(rest[1:] and rest[1]))}
        else:
            options |= {"ceil_mode": int(bool(rest and rest[0])), "count_include_pad": int(not rest[1:] or rest[1])}
        self._add(_POOLS[name], [self._value(x)], output, **options)

    def _flatten(self, output: str, x: Any, start: int = 0, end: int = -1) -> None:
        if (start, end) != (1, -1):
            raise UnknownFunction(f"flatten of dimensions {start} to {end} has no translation")
        self._add("Flatten", [self._value(x)], output, axis=1)

    def _view(self, output: str, x: Any, size: Any) -> None:
        # a number that is a node is the size of the batch
        sizes = [0 if isinstance(n, fx.Node) and i == 0 else n for i, n in enumerate(size)]
        if any(isinstance(n, fx.Node) for n in sizes):
            raise UnknownFunction(f"a view of sizes {size} has no translation")
        if len(sizes) == 2 and sizes[0] in (0, -1):
            sizes = [0, -1]
        self._add("Reshape", [self._value(x), self._weight(np.array(sizes, np.int64))], output)

    _reshape = _view

    def _expand(self, output: str, x: Any, sizes: Any, **_: Any) -> None:
        # a size that stays is that of the tensor, or a node
        wanted = [n if isinstance(n, int) and n > 0 else 1 for n in sizes]
        self._add("Expand", [self._value(x), self._weight(np.array(wanted, np.int64))], output)

    def _expand_as(self, output: str, x: Any, other: Any) -> None:
        self._add("Shape", [self._value(other)], f"{output}s")
        self._add("Expand", [self._value(x), f"{output}s"], output)

    def _linear(self, output: str, x: Any, w: Any, b: Any = None) -> None:
        self._add("Gemm", [self._value(a) for a in (x, w, b) if a is not None], output, transB=1)

    def _pad(self, output: str, x: Any, pads: Any, mode: str = "constant", value: float | None = None) -> None:
        if mode != "constant" or len(pads) != 4:
            raise UnknownFunction(f"pad of mode {mode} has no translation")
        left, right, top, bottom = pads
        where = self._weight(np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))
        self._add("Pad", [self._value(x), where, self._value(value or 0.0)], output)

    def _constant_pad_nd(self, output: str, x: Any, pads: Any, value: float = 0.0) -> None:
        self._pad(output, x, pads, "constant", value)

    def _cat(self, output: str, tensors: Any, axis: int = 0) -> None:
        self._add("Concat", [self._value(t) for t in tensors], output, axis=axis)


def _pair(value: Any) -> list[int]:
    return [int(value)] * 2 if isinstance(value, int) else [int(v) for v in (*value, *value)[:2]]
