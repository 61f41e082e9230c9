"""Fused models under torch.compile and torch.export, which see PyTorch's own operators."""

import copy
from collections import Counter

import pytest
import torch
from fused_models import check_close, disturb, fuse_all, observe, set_mode, small, unit
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import nasfast
from nasfast.fusion import dynamo

pytestmark = pytest.mark.usefixtures("native")
CHAIN = torch.ops.nasfast.conv_bn_act_chain_fwd


def test_the_backend_finds_the_chains_of_a_fused_model():
    torch.compiler.reset()
    operators = Counter()

    def keep(graph, example):
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph

    inner = aot_autograd(fw_compiler=keep)
    model = set_mode(disturb(small()), "frozen convolutions").to(memory_format=torch.channels_last)
    assert len(fuse_all(model).chains) == 5
    eager, x = copy.deepcopy(model), torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    model.compile(backend=dynamo.compile_graph, options={"inner": inner, "only_faster": False}, fullgraph=True)
    check_close(observe(model, x), observe(eager, x), rtol=1e-3, atol=1e-3)
    assert sum(number for name, number in operators.items() if "nasfast" in name and "fwd" in name) == 5


def test_changes_of_settings_are_guarded():
    torch.compiler.reset()
    model = disturb(nn.Sequential(unit(nn.ReLU6()), unit())).requires_grad_(False)
    fuse_all(model)
    eager, x = copy.deepcopy(model), torch.randn(2, 4, 9, 9)
    run = torch.compile(model, backend="eager", fullgraph=True)
    changes = [
        lambda m: None,
        lambda m: m.eval(),
        lambda m: setattr(m[0][1], "eps", 0.3),
        lambda m: m[0].__setitem__(2, nn.Tanh()),
        lambda m: setattr(m[0][0], "stride", (2, 2)),
    ]
    for change in changes:
        change(model), change(eager)
        torch.testing.assert_close(run(x), eager(x))


def test_exports_have_pytorchs_operators():
    model = nn.Sequential(nn.Sequential(unit(), unit()), nn.Sequential(unit(), unit())).eval()
    fuse_all(model)
    x = torch.randn(2, 4, 9, 9)
    exported = torch.export.export(model, (x,))
    assert not any("nasfast" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.aot
def test_inductor_compiles_what_is_in_no_chain():
    model = disturb(nn.Sequential(unit(), unit(), nn.Softplus()))
    set_mode(model.to(memory_format=torch.channels_last), "frozen convolutions")
    exact = copy.deepcopy(model)
    nasfast.fuse(model, only_faster=False, inner="inductor")
    x = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    # gradients are sums over 162 pixels, in another order
    check_close(observe(model, x), observe(exact, x), rtol=1e-4, atol=1e-4)
    (graph,) = model.forward.region.graphs
    assert graph.facts.replaced == 1 and not model.forward.region.own
