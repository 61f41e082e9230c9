"""Pairs of chains, of which the first may leave its result to the second: see nasfast/ops/destinations.py."""

from dataclasses import replace

import torch

from kernel_cases.chain import ChainCase, Drawn
from kernel_cases.cuda import moved
from nasfast import ops
from nasfast.ops.destinations import Offer, Remains, Unmade, offered

# what leaves: with and without a residual; what makes: the expansion stored and computed again, several groups of
# columns, tiles of several kinds, no expansion, a single convolution; what keeps launches of its own in backward: a
# first kernel that is depthwise and adds, a last convolution that is depthwise
PAIRS = [
    (ChainCase((2, 24, 9, 8), "pw72/relu6 dw3/relu6 pw24/identity", "x"), "pw72/relu6 dw5/relu6 pw24/identity", "x"),
    (ChainCase((3, 16, 8, 7), "pw48/relu6 dw3s2/relu6 pw40/identity"), "pw120/relu6 dw3/relu6 pw40/identity", "x"),
    (ChainCase((1, 112, 5, 13), "pw224/relu dw3/relu pw112/identity", "x"), "pw672/relu dw3s2/relu pw128/identity", ""),
    (ChainCase((2, 8, 7, 7), "dw3/relu6 pw256/identity"), "pw1536/relu6 pw256/identity", "x"),
    (ChainCase((1, 16, 40, 41), "pw16/identity", "x"), "pw136/relu6 pw24/identity", ""),
    (ChainCase((2, 16, 6, 9), "pw32/relu6 dw3/relu6 pw16/identity", "x"), "dw5s2/relu6 pw24/identity", ""),
    (ChainCase((1, 8, 1, 3), "pw8/identity"), "pw16/relu6", ""),
    (ChainCase((2, 16, 6, 9), "pw16/identity"), "dw3/relu6 pw16/identity", "x"),
    (ChainCase((2, 16, 7, 5), "pw32/relu6 dw3/identity"), "pw64/relu6 dw3/relu6 pw32/identity", "x"),
]


def drawn_pair(pair, dtype):
    case, units, residual = pair
    first = replace(case, dtype=dtype).draw_once()
    shape = first.grad.shape
    second = ChainCase(tuple(shape), units, residual or "none", dtype=dtype).draw_once()
    return moved(first), moved(second)


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan)


def offer(source, *, unmade=None, result=None, remains=None, input_gradient=None):
    images = {"result": result, "input_gradient": input_gradient, "parameter_gradients": {}}
    return Offer(source=source, unmade=unmade, remains=remains, **images)


def remains_of(x: torch.Tensor) -> Remains:
    remains = Remains(x)
    for tensor in remains.take():
        tensor.fill_(torch.nan)
    return remains


def run_two(
    first: Drawn, second: Drawn, *, leaving: bool, begins: bool = True, trains: bool = True
) -> tuple[dict[str, torch.Tensor], Unmade | None]:
    """Results and gradients of one chain behind another, whose input is between them, and what the first one left.

    As in an engine, the input of the second chain is memory that belongs to nobody's graph.

    Args:
        leaving: whether the first chain leaves its result.
        begins: whether the second chain then begins the first one's backward; otherwise a launch of its own does.
        trains: whether anything in front of the first chain trains.
    """
    results, between, gradient = {}, nan_like(second.x), nan_like(second.x)
    remains = remains_of(between) if leaving else None
    left, inputs, outputs = None, [first.x, between], []
    for i, drawn in enumerate((first, second)):
        x = inputs[i].detach().requires_grad_(trains or i > 0)
        if i == 0:
            made = offer(inputs[i], result=between, remains=remains)
        else:
            made = offer(inputs[i], unmade=left, input_gradient=gradient if begins else None)
        stages = [with_gradients(stage) for stage in drawn.stages]
        residual = x if drawn.residual is drawn.x else drawn.residual
        with offered(made):
            y = ops.conv_bn_act_chain(x, stages, residual=residual, backend="cuda")
        outputs.append((x, stages, y))
        if i == 0:
            assert y.data_ptr() == between.data_ptr()
            assert (made.left is not None) == leaving and bool(between.isnan().all()) == leaving
            left = made.left
        else:
            assert made.made == leaving
    results |= {"between": between, "y": outputs[1][2].detach()}
    for i, grad in ((1, second.grad), (0, None)):
        x, stages, y = outputs[i]
        y.backward(outputs[1][0].grad if grad is None else grad)
        if i == 1:
            assert made.begun == (leaving and begins)
            if leaving and not begins:
                left.begin_backward(x.grad)
        if x.requires_grad:
            results[f"dx of {i}"] = x.grad
        for j, stage in enumerate(stages):
            results |= {f"dgamma{j} of {i}": stage.params.bn_weight.grad, f"dbeta{j} of {i}": stage.params.bn_bias.grad}
    return results, left


def with_gradients(stage: ops.Stage) -> ops.Stage:
    params = stage.params
    weight, bias = (t.detach().clone().requires_grad_() for t in (params.bn_weight, params.bn_bias))
    return stage._replace(params=params._replace(bn_weight=weight, bn_bias=bias, running_mean=None, running_var=None))
