"""Fused models under torch.compile: the compiled graphs have the operators of the chains."""

import copy
from collections import Counter

import pytest
import torch
from fused_models import Candidate, check_close, disturb, fuse_all, observe, set_mode, small, unit
from torch import nn
from torchvision.models.mobilenetv2 import InvertedResidual

import nasfast

pytestmark = pytest.mark.usefixtures("native")
CHAIN = torch.ops.nasfast.conv_bn_act_chain_fwd


@pytest.fixture
def compiled():
    """A function that compiles a model in place without graph breaks, and the operators in its graphs so far."""
    torch.compiler.reset()
    operators = Counter()

    def count(graph, example):
        operators.update(node.target for node in graph.graph.nodes)
        return graph

    def compile_model(model):
        model.compile(backend=count, fullgraph=True)
        return model

    yield compile_model, operators
    torch.compiler.reset()


@pytest.mark.parametrize("training", [True, False])
def test_networks_compute_the_same_on_the_chain_operators(training, compiled):
    model = set_mode(disturb(small()), "frozen convolutions").train(training)
    assert len(fuse_all(model).chains) == 5
    eager, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64)
    compile_model, operators = compiled
    check_close(observe(compile_model(model), x, 2), observe(eager, x, 2))
    # the stem is one stage whose input has a gradient: a convolution and the operator of BatchNorm
    assert operators[CHAIN] + operators[torch.ops.nasfast.bn_act_fwd] == 5 and operators[torch.conv2d] == 0


def test_the_backward_has_the_operator():
    """What AOTAutograd gives to compilers, forward and backward."""
    graphs = []

    def keep(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    model = InvertedResidual(4, 4, 1, 2)
    model.conv[1][0].requires_grad_(False)
    fuse_all(model)
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)
    eager, x = copy.deepcopy(model), torch.randn(2, 4, 9, 9)
    model.compile(backend=backend, fullgraph=True)
    check_close(observe(model, x), observe(eager, x))
    assert [any("nasfast.conv_bn_act_chain" in target for target in graph) for graph in graphs] == [True, True]


def test_changes_of_settings_are_guarded():
    torch.compiler.reset()
    model = disturb(nn.Sequential(unit(nn.ReLU6()), unit())).requires_grad_(False)
    fuse_all(model)
    eager, x = copy.deepcopy(model), torch.randn(2, 4, 9, 9)
    run = torch.compile(model, backend="eager")
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


def test_the_rule_decides_by_size(compiled):
    compile_model, operators = compiled
    model = nn.Sequential(nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU6()).requires_grad_(False)
    nasfast.fuse(model)
    run = compile_model(model)
    run(torch.randn(2, 16, 8, 8))
    assert operators[CHAIN] == 0
    run(torch.randn(2, 16, 40, 40))
    assert operators[CHAIN] == 1


def test_other_forwards_run_unfused(compiled):
    """Dynamo cannot trace placeholders."""
    compile_model, operators = compiled
    model = disturb(nn.Sequential(unit(), Candidate(3))).eval()
    report = fuse_all(model)
    assert len(report.chains) == 2
    x = torch.randn(2, 4, 9, 9)
    want = model(x)
    torch.testing.assert_close(compile_model(model)(x), want)
    assert operators[CHAIN] + operators[torch.ops.nasfast.bn_act_fwd] == 1 and operators[torch.conv2d] >= 3


def test_exports_have_pytorchs_operators():
    model = nn.Sequential(nn.Sequential(unit(), unit()), nn.Sequential(unit(), unit())).eval()
    fuse_all(model)
    x = torch.randn(2, 4, 9, 9)
    exported = torch.export.export(model, (x,))
    assert not any("nasfast" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), model(x))
