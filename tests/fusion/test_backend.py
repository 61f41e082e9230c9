"""`torch.compile(model, backend="nasfast")`: the same results, and chains on our operators."""

import copy
import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
import torchvision
from fused_models import (
    MODELS,
    Body,
    Fickle,
    added_in_place,
    check_close,
    check_same,
    conv,
    disturb,
    make,
    observe,
    set_mode,
    unit,
    whole,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torchvision.models.mobilenetv2 import InvertedResidual

from nasfast.fusion import dynamo

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def ways(monkeypatch):
    """How many chains of the compiled graphs became calls of the operator."""
    torch.compiler.reset()
    found = Counter()
    fuse_graph = dynamo.fuse_graph

    def record(*args, **kwargs):
        here = fuse_graph(*args, **kwargs)
        found.update({"OPERATOR": here.replaced})
        return here

    monkeypatch.setattr(dynamo, "fuse_graph", record)
    yield found
    torch.compiler.reset()


def compile_model(model: nn.Module, inner: str = "aot_eager", *, only_faster: bool = False, **settings) -> nn.Module:
    """Compile a model in place, so that the names of its parameters stay."""
    settings.setdefault("fullgraph", True)
    model.compile(backend=dynamo.compile_graph, options={"inner": inner, "only_faster": only_faster}, **settings)
    return model


def images(*shape: int, dtype: torch.dtype = torch.double) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)


def check(model: nn.Module, x: torch.Tensor, steps: int = 2) -> None:
    """Compare a compiled model with its eager copy: result, gradients and buffers."""
    compiled = copy.deepcopy(model)
    compile_model(compiled)
    check_same(observe(compiled, x, steps), observe(model, x, steps))


FROZEN, ALL, EVAL = "frozen convolutions", "all trainable", "eval"
NETWORKS = [
    *(("small mobilenet_v2", mode) for mode in (FROZEN, ALL, EVAL, "mixed")),
    ("small resnet", ALL),
    ("small efficientnet", EVAL),
    ("small shufflenet_v2", FROZEN),
    ("small mobilenet_v3", FROZEN),
    pytest.param("mobilenet_v2", FROZEN, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mode"), NETWORKS)
def test_networks_compute_the_same_in_float64(name, mode, ways):
    model = make(name).double().to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, (nn.Dropout, torchvision.ops.StochasticDepth)):
            module.p = 0.0
    check(set_mode(disturb(model), mode), images(2, 3, 64, 64))
    assert ways == {"OPERATOR": MODELS[name][2]}


WAYS = ["read twice", "other activation", "dropped", "normalised twice", "more convolutions", "no gradient first"]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_a_forward_is_right(way):
    model = disturb(Fickle()).double().to(memory_format=torch.channels_last)
    model.way = way
    check(model, images(2, 4, 6, 6))


def changed_between(m: Body, x: torch.Tensor) -> torch.Tensor:
    x = 1 * x
    y = m.conv1(x)
    x.mul_(3)
    return m.bn2(m.conv2(m.act(m.bn1(y)))) + x


def cast_inside(m: Body, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m.conv1(x)
    return m.bn2(m.conv2(m.act(m.bn1(y.to(x.dtype)))))


LEFT = {
    "no affine parameters": (lambda: Body(whole, bn1=nn.BatchNorm2d(8, affine=False)), 1),
    "stride that is not square": (lambda: nn.Sequential(conv(4, 4, 3, stride=(2, 1)), nn.BatchNorm2d(4)), 0),
    "shared BatchNorm": (lambda: Body(whole, bn1=(bn := nn.BatchNorm2d(8)), bn2=bn, conv2=conv(8, 8, 1)), 2),
    "autocast between": (lambda: Body(cast_inside), 1),
    "added in place": (lambda: Body(added_in_place), 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_no_chain_is_left(case, ways):
    build, chains = LEFT[case]
    check(disturb(build()).double().to(memory_format=torch.channels_last), images(2, 4, 6, 6))
    assert ways["OPERATOR"] == chains


def test_the_input_of_a_chain_may_change(ways):
    model = disturb(Body(changed_between)).double().to(memory_format=torch.channels_last)
    compiled = compile_model(copy.deepcopy(model))
    x = images(2, 4, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert ways["OPERATOR"] == 1


def test_results_keep_their_layout(ways):
    model = disturb(unit())
    compiled = compile_model(copy.deepcopy(model))
    x = torch.randn(2, 4, 6, 6)
    assert compiled(x).stride() == model(x).stride() and not ways["OPERATOR"]


def test_the_rule_decides_by_size_and_by_what_trains(executed):
    depthwise = conv(64, 64, 3, padding=1, groups=64)
    model = nn.Sequential(depthwise, nn.BatchNorm2d(64), nn.ReLU6()).to(memory_format=torch.channels_last)
    compile_model(model, only_faster=True, dynamic=False)
    for size, trains, count in [(40, True, 0), (8, False, 0), (160, False, 1)]:
        model[0].requires_grad_(trains)
        model(images(2, 64, size, size, dtype=torch.float))
        assert bool(executed) == bool(count)


def test_other_batch_sizes_run_on_the_operators(ways):
    operators = Counter()

    def count(graph, example):
        operators.update(node.target for node in graph.graph.nodes)
        return graph

    inner = aot_autograd(fw_compiler=count)
    model = set_mode(disturb(InvertedResidual(4, 4, 1, 2)), "frozen convolutions").to(memory_format=torch.channels_last)
    compiled = compile_model(copy.deepcopy(model), inner)
    for graphs, batch in enumerate((2, 3, 4, 2), 1):
        x = images(batch, 4, 9, 9, dtype=torch.float)
        check_close(observe(compiled, x), observe(model, x), rtol=1e-4, atol=1e-4)
        # each size has its own graph
        assert operators[torch.ops.nasfast.conv_bn_act_chain_fwd.default] == ways["OPERATOR"] == min(graphs, 3)


def test_autocast_runs_on_the_operators(executed, ways):
    model = set_mode(disturb(InvertedResidual(4, 4, 1, 2)), "frozen convolutions").to(memory_format=torch.channels_last)
    compiled, x = compile_model(copy.deepcopy(model), "eager"), images(2, 4, 9, 9, dtype=torch.float)
    exact = observe(copy.deepcopy(model), x)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = observe(model, x), observe(compiled, x)
    assert len(executed) == 1 and got.keys() == want.keys()
    for name in want:
        allowed, error = ((seen[name] - exact[name]).double().norm() for seen in (want, got))
        assert error <= 1.5 * allowed + 1e-6, name


def test_wrong_options_are_refused():
    model, x = unit(), torch.randn(2, 4, 6, 6)
    with pytest.raises(Exception, match="unknown options"):
        torch.compile(model, backend=dynamo.compile_graph, options={"iner": "eager"})(x)
    with pytest.raises(Exception, match="it has no modes"):
        torch.compile(model, backend=dynamo.compile_graph, mode="max-autotune")(x)


def test_a_compiler_is_looked_for_only_where_no_inner_is_given(monkeypatch):
    names, x = [], torch.randn(2)
    # no compiler is found, so that the default is "eager"
    monkeypatch.setattr(dynamo.shutil, "which", names.append)
    for options in ({"inner": "eager"}, {}):
        assert not names
        compiled = dynamo.compile_graph(torch.fx.symbolic_trace(nn.Identity()), [x], options=options)
        assert torch.equal(compiled(x), x)
    assert names


def test_pytorch_finds_the_backend_by_its_name():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["nasfast"].partition(":")
    assert getattr(importlib.import_module(module), name) is dynamo.compile_graph


@pytest.mark.aot
def test_inductor_compiles_what_is_left(ways):
    model = set_mode(disturb(InvertedResidual(4, 4, 1, 2)), "frozen convolutions").to(memory_format=torch.channels_last)
    compiled, x = copy.deepcopy(model), images(2, 4, 8, 8, dtype=torch.float)
    compile_model(compiled, "inductor")
    check_close(observe(compiled, x, 2), observe(model, x, 2), rtol=1e-4, atol=1e-4)
    assert ways["OPERATOR"] == 1
