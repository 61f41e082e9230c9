"""Chains on static buffers, also with a last BatchNorm that is deferred to the next, against calls of the operator."""

import pytest
import torch
from kernel_cases.chain import ChainCase, ChainInputs
from kernel_cases.chain_pairs import PAIRS, draw_pair, nan_like, run_both, run_two
from kernel_cases.cuda import needs_kernels

from benchmarks.captures import reduced_by_launches
from nasfast.ops.chain.deferred import DeferredNorm, DeferredResult

pytestmark = needs_kernels
TYPES = [torch.bfloat16, torch.float16]
# the largest relative error of one rounding
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12}


def assert_same(results, expected):
    for name, value in expected.items():
        assert torch.equal(results[name], value), name


def assert_reduced(results, expected, first: ChainInputs, norm: DeferredNorm):
    """The sums that the second chain takes of its own gradient differ from those of a launch by roundings."""
    rounding = ROUNDING[first.x.dtype]
    for name, value in expected.items():
        if not name.endswith("of 0"):
            assert torch.equal(results[name], value), name
            continue
        # a sum may be much smaller than its terms, of which the gradients of beta are sums, too
        size = max(float(v.double().norm()) for k, v in expected.items() if k[:5] == name[:5])
        assert float((results[name] - value).double().norm()) <= 4 * rounding * size, name
    # against float64, from the gradient that the second chain has stored
    dz, y, (gamma, _, eps) = results["dx of 1"].double(), norm.y.double(), last_norm(first)
    mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), correction=0, keepdim=True)
    xhat, last, count = (y - mean) / (var + eps).sqrt(), len(first.stages) - 1, y.numel() // y.shape[1]
    dgamma, dbeta = (dz * xhat).sum((0, 2, 3)), dz.sum((0, 2, 3))
    for name, want, terms in (("dbeta", dbeta, dz), ("dgamma", dgamma, dz * xhat)):
        # what is added up is not rounded yet, or is what was stored
        allowed = 2 * rounding * float(terms.norm()) + 1e-6 * float(terms.abs().sum())
        assert float((results[f"{name}{last} of 0"] - want).norm()) <= allowed, name
    a, b, c = (norm.back[:, i].double().view(-1, 1, 1) for i in range(3))
    a_dz = gamma.view(-1, 1, 1) / (var + eps).sqrt() * dz
    parts = (dbeta.view(-1, 1, 1) + xhat * dgamma.view(-1, 1, 1)) / count
    dy = a_dz - gamma.view(-1, 1, 1) / (var + eps).sqrt() * parts
    assert float((a * dz + b * y + c - dy).norm()) <= 2 * rounding * float(a_dz.norm())


@pytest.mark.parametrize("dtype", TYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1].replace(' ', '_')}")
def test_results_and_gradients_are_the_same_bits(pair, dtype, emulation):
    first, second = draw_pair(pair, dtype)
    expected = run_both(first, second)
    assert_same(run_two(first, second, defers=False)[0], expected)
    with reduced_by_launches():
        assert_same(run_two(first, second, defers=True)[0], expected)
    results, deferred = run_two(first, second, defers=True)
    assert not any(result.isnan().any() for result in results.values())
    assert_reduced(results, expected, first, deferred.norm)
    assert (deferred.added is None) == (first.residual is None)
    # against float64, from the output that the first chain has stored
    y, (gamma, beta, eps) = deferred.norm.y.double(), last_norm(first)
    mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), correction=0, keepdim=True)
    x = (y - mean) / (var + eps).sqrt() * gamma.view(-1, 1, 1) + beta.view(-1, 1, 1)
    if first.residual is not None:
        x = x + first.x.double()
    assert (results["between"].double() - x).norm() <= 1.2 * ROUNDING[dtype] * x.norm()


def last_norm(inputs):
    stage = inputs.stages[-1]
    return stage.params.bn_weight.double(), stage.params.bn_bias.double(), stage.eps


@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
def test_a_result_does_not_depend_on_the_order_of_threads_and_blocks(multiprocessors, emulation):
    first, second = draw_pair(PAIRS[0], torch.bfloat16)
    between, expected = run_both(first, second)["between"], None
    for backwards, order in [(False, 0), (True, 0), (False, 1), (True, 29)]:
        emulation(multiprocessors, backwards, order)
        results, deferred = run_two(first, second, defers=True)
        assert torch.equal(results["between"], between)
        if expected is None:
            assert_reduced(results, run_both(first, second), first, deferred.norm)
            expected = results
        assert_same(results, expected)


def test_nan_reaches_the_input_that_is_made(emulation):
    first, second = draw_pair(PAIRS[0], torch.bfloat16)
    first.stages[-1].params.bn_weight[5] = torch.nan
    expected = run_both(first, second)
    results, _ = run_two(first, second, defers=True)
    assert results["between"].isnan().sum((0, 2, 3)).bool().nonzero().tolist() == [[5]]
    for name, value in expected.items():
        assert torch.equal(results[name].isnan(), value.isnan()), name


def test_an_input_may_be_made_by_itself(emulation):
    first, second = draw_pair(PAIRS[0], torch.bfloat16)
    _, deferred = run_two(first, second, defers=True)
    x = nan_like(second.x)
    deferred.apply(x)
    assert torch.equal(x, run_both(first, second)["between"])


def test_tensors_of_another_shape_are_refused(emulation):
    first, second = draw_pair(PAIRS[0], torch.bfloat16)
    _, deferred = run_two(first, second, defers=True)
    norm, x = deferred.norm, nan_like(second.x)
    for bad, message in [
        (DeferredResult(norm._replace(y=norm.y[:1]), deferred.added), "y must be channels_last"),
        (DeferredResult(norm, norm.y.half()), "what is added must be channels_last, of the type"),
        (DeferredResult(norm._replace(fold=norm.fold[:-1])), "fold must be contiguous and have 48 elements"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            bad.apply(x)
    for changed, message in [
        ({"y": norm.y[:1]}, "y of a deferred BatchNorm must be channels_last"),
        ({"statistics": norm.statistics.float()}, "statistics must be contiguous and have 48 elements"),
        ({"back": norm.back[:-1]}, "back must be contiguous and have 96 elements"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            norm._replace(**changed).reduce(second.x)
    with pytest.raises(RuntimeError, match="x is made from y, its fold|multiples of 8 is made from y, its fold"):
        torch.ops.nasfast.conv_bn_act_chain_gpu_apply(x, [norm.y])


@pytest.mark.parametrize("units", ["pw16/identity", "pw48/relu6 dw3/relu6 pw16/identity"])
def test_a_chain_with_nothing_in_front_that_trains(units, emulation):
    """Without kernels of its own in backward, it begins itself."""
    pair = ChainCase((2, 16, 5, 4), units), "pw32/relu6", ""
    first, second = draw_pair(pair, torch.bfloat16)
    expected = run_both(first, second, trains=False)
    results, deferred = run_two(first, second, defers=True, trains=False)
    if len(first.stages) == 1:
        assert_same(results, expected)
    else:
        assert_reduced(results, expected, first, deferred.norm)
