"""Pairs of chains, of which the first may defer its last BatchNorm to the second: see nasfast/ops/chain/deferred.py."""

from dataclasses import replace

import torch

from kernel_cases.chain import ChainCase, ChainInputs
from kernel_cases.cuda import moved
from nasfast import ops, use_backend
from nasfast.ops.chain.call import cuda_plan
from nasfast.ops.chain.deferred import DeferredNorm, DeferredResult
from nasfast.ops.chain.static import StaticChain

# what defers: with and without a residual; what makes: expansions, several groups of
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


def draw_pair(pair, dtype):
    case, units, residual = pair
    first = replace(case, dtype=dtype).draw_once()
    shape = first.grad.shape
    second = ChainCase(tuple(shape), units, residual or "none", dtype=dtype).draw_once()
    return moved(first), moved(second)


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan)


def static_chain(inputs: ChainInputs, x: torch.Tensor, y: torch.Tensor, **options) -> StaticChain:
    """The chain of a case on these buffers, with buffers for the gradients of its BatchNorms."""
    stages = [with_gradients(stage) for stage in inputs.stages]
    plan = cuda_plan(x.detach().requires_grad_(options.get("dx") is not None), stages)
    parameters = [p for stage in stages for p in (stage.params.bn_weight, stage.params.bn_bias)]
    adds_input = inputs.residual is inputs.x
    return StaticChain(
        lambda: stages, plan, x, y, adds_input, gradients={p: nan_like(p) for p in parameters}, **options
    )


def run_two(
    first: ChainInputs, second: ChainInputs, *, defers: bool, trains: bool = True
) -> tuple[dict[str, torch.Tensor], DeferredResult | None]:
    """Results and gradients of one chain behind another, whose input is between them, and what the first one deferred.

    Args:
        defers: whether the first chain defers its last BatchNorm to the second.
        trains: whether anything in front of the first chain trains.
    """
    between, grad, dx, y = (nan_like(like) for like in (second.x, second.x, first.x, second.grad))
    norm = DeferredNorm(*map(nan_like, DeferredNorm.empty(between))) if defers else None
    with use_backend("cuda"):
        one = static_chain(first, first.x, between, dx=dx if trains else None, deferred_norm=norm)
        two = static_chain(second, between, y, dx=grad, deferred_input=one.result)
    one.forward()
    assert bool(between.isnan().all()) == defers
    two.forward()
    results = {"between": between, "y": y}
    two.backward(second.grad)
    one.backward(grad)
    results |= {"dx of 1": grad} | ({"dx of 0": dx} if trains else {})
    for i, chain in enumerate((one, two)):
        for j, stage in enumerate(chain.stages()):
            results |= {
                f"dgamma{j} of {i}": chain.gradients[stage.params.bn_weight],
                f"dbeta{j} of {i}": chain.gradients[stage.params.bn_bias],
            }
    return results, one.result


def run_both(first: ChainInputs, second: ChainInputs, *, trains: bool = True) -> dict[str, torch.Tensor]:
    """The same results by autograd, from two calls of `conv_bn_act_chain`."""
    results, calls = {}, []
    x = first.x.detach().requires_grad_(trains)
    for inputs in (first, second):
        stages = [with_gradients(stage) for stage in inputs.stages]
        y = ops.conv_bn_act_chain(x, stages, residual=x if inputs.residual is inputs.x else None, backend="cuda")
        calls.append((x, stages, y))
        x = y.detach().requires_grad_()
    calls[1][2].backward(second.grad)
    calls[0][2].backward(calls[1][0].grad)
    results |= {"between": calls[0][2].detach(), "y": calls[1][2].detach()}
    for i, (x, stages, _) in enumerate(calls):
        results |= {f"dx of {i}": x.grad} if x.requires_grad else {}
        for j, stage in enumerate(stages):
            results |= {f"dgamma{j} of {i}": stage.params.bn_weight.grad, f"dbeta{j} of {i}": stage.params.bn_bias.grad}
    return results


def with_gradients(stage: ops.Stage) -> ops.Stage:
    params = stage.params
    weight, bias = (t.detach().clone().requires_grad_() for t in (params.bn_weight, params.bn_bias))
    return stage._replace(params=params._replace(bn_weight=weight, bn_bias=bias, running_mean=None, running_var=None))
