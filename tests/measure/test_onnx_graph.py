"""ONNX of captured graphs beside PyTorch, function by function."""

import pytest
import torch
from torch import fx, nn

from nasfast.measure.onnx_graph import UnknownFunction, graph_onnx
from nasfast.runtime.onnx import INPUT, OUTPUT, open_session

aten = torch.ops.aten
W = "weight of a tensor"  # an argument that is a tensor of the shape behind it

# function, arguments behind the image (2, 8, 9, 9)
CASES = [
    (aten.conv2d.default, [(W, 12, 8, 3, 3), (W, 12), [2, 1], [1, 2]]),
    (aten.conv2d.default, [(W, 8, 2, 3, 3), None, [1, 1], [0, 0], [2, 2], 4]),
    (aten.conv2d.default, [(W, 4, 8, 1, 1)]),
    (aten.conv2d.padding, [(W, 8, 1, 3, 3), None, [1, 1], "same", [1, 1], 8]),
    (aten.conv2d.padding, [(W, 8, 1, 3, 3), None, [1, 1], "valid", [1, 1], 8]),
    (aten.batch_norm.default, [(W, 8), (W, 8), (W, 8), (W, 8), False, 0.1, 1e-3, True]),
    (aten.batch_norm.default, [None, None, (W, 8), (W, 8), False, 0.1, 1e-5, True]),
    *((function, []) for function in (
        aten.relu.default, aten.relu_.default, aten.relu6.default, aten.silu.default, aten.sigmoid.default,
        aten.hardswish.default, aten.hardsigmoid.default, aten.tanh.default, aten.elu.default, aten.clone.default,
    )),
    (aten.hardtanh.default, [-0.5, 0.25]),
    (aten.clamp.default, [None, 0.3]),
    (aten.dropout.default, [0.5, False]),
    (aten.add.Tensor, [(W, 8, 1, 1)]),
    (aten.mul.Tensor, [0.5]),
    (aten.expand.default, [[-1, 8, 9, 9]]),
    (aten.expand_as.default, [(W, 2, 8, 9, 9)]),
    (aten.div.Tensor, [3]),
    (aten.mean.dim, [[2, 3], True]),
    (aten.mean.dim, [[2, 3]]),
    (aten.adaptive_avg_pool2d.default, [[1, 1]]),
    (aten.max_pool2d.default, [[3, 3], [2, 2], [1, 1]]),
    (aten.max_pool2d.default, [[2, 2], [2, 2], [0, 0], [1, 1], True]),
    (aten.avg_pool2d.default, [[3, 3], [1, 1], [1, 1], False, False]),
    (aten.avg_pool2d.default, [[2, 2]]),
    (aten.flatten.using_ints, [1]),
    (aten.view.default, [[2, -1]]),
    (aten.pad.default, [[0, 1, 2, 0]]),
    (aten.constant_pad_nd.default, [[1, 1, 0, 2], -1.0]),
]  # fmt: skip


def graph_of(function, arguments):
    generator = torch.Generator().manual_seed(1)
    root, graph = nn.Module(), fx.Graph()
    nodes = [graph.placeholder("x")]
    for i, argument in enumerate(arguments):
        if isinstance(argument, tuple):
            root.register_buffer(f"t{i}", torch.rand(argument[1:], generator=generator) + 0.1)
            argument = graph.get_attr(f"t{i}")
        nodes.append(argument)
    graph.output(graph.call_function(function, tuple(nodes)))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(("function", "arguments"), CASES, ids=[f"{f} {a}" for f, a in CASES])
def test_a_function_computes_what_pytorch_does(function, arguments):
    module = graph_of(function, arguments)
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(0))
    (got,) = open_session(graph_onnx(module), threads=1).run([OUTPUT], {INPUT: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), module(x.clone()), rtol=1e-4, atol=1e-5)


def test_a_linear_layer_behind_a_mean():
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("w", torch.randn(3, 8))
    root.register_buffer("b", torch.randn(3))
    mean = graph.call_function(aten.mean.dim, (graph.placeholder("x"), [2, 3]))
    graph.output(graph.call_function(aten.linear.default, (mean, graph.get_attr("w"), graph.get_attr("b"))))
    module, x = fx.GraphModule(root, graph), torch.randn(2, 8, 4, 4)
    (got,) = open_session(graph_onnx(module), threads=1).run([OUTPUT], {INPUT: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), module(x), rtol=1e-4, atol=1e-5)


def test_what_has_no_translation_is_refused():
    with pytest.raises(UnknownFunction, match="cumsum"):
        graph_onnx(graph_of(aten.cumsum.default, [1]))
    with pytest.raises(UnknownFunction, match="elu with"):
        graph_onnx(graph_of(aten.elu.default, [2.0]))
    with pytest.raises(UnknownFunction, match="adaptive_avg_pool2d"):
        graph_onnx(graph_of(aten.adaptive_avg_pool2d.default, [[2, 2]]))
