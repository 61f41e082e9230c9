"""What `fuse` does by default: chains run on the operator, folded or on PyTorch, as is expected to be fastest."""

import copy
import pickle

import pytest
import torch
from fused_models import (
    MODELS,
    Candidate,
    Switch,
    check_same,
    conv,
    disturb,
    make,
    median_error,
    observe,
    set_mode,
    unit,
)
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nasfast
from nasfast.fusion import rule
from nasfast.fusion.forward import Binding

RECORDED = rule.LEAST_RECORDED  # which is 0 in the other tests


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_without_gradients_run_folded(name, folds, executed):
    plain = disturb(make(name)).eval()
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    report = nasfast.fuse(fused)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        for size in (64, 48):
            want = exact(x[..., :size].double())
            assert_close("result", fused(x[..., :size]), want, FLOAT32_CHAIN)
    assert sum(folds) == report.fused
    assert executed == []


def block() -> nn.Sequential:
    """Large enough for the operator and for oneDNN's convolution."""
    return nn.Sequential(
        nn.Sequential(conv(16, 96, 1), nn.BatchNorm2d(96), nn.ReLU6()),
        nn.Sequential(conv(96, 96, 3, padding=1, groups=96), nn.BatchNorm2d(96), nn.ReLU()),
        nn.Sequential(conv(96, 32, 3, stride=2, padding=1, groups=2, bias=True), nn.BatchNorm2d(32), nn.Tanh()),
    ).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_folding(dtype, layout, folds):
    plain = disturb(block()).eval().to(dtype)
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(4, 16, 40, 40).to(dtype).contiguous(memory_format=layout)
    tolerance = {torch.float32: FLOAT32_CHAIN, torch.float64: None}.get(dtype, BFLOAT16_CHAIN)
    got = fused(x)
    assert got.dtype == dtype
    assert_close("folded", got, exact(x.double()), tolerance)
    fused(x)
    assert folds == [3]
    if dtype == torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            got = fused(x)
        assert got.dtype == torch.bfloat16
        assert_close("autocast", got, exact(x.double()), BFLOAT16_CHAIN)
        assert_close("without again", fused(x), exact(x.double()), FLOAT32_CHAIN)
        assert folds == [3, 3, 3]


SOURCES = ["0.0.weight", "2.0.bias", "1.1.weight", "2.1.running_mean"]


@pytest.mark.parametrize("source", [*SOURCES, "eps", "replaced", "loaded", "trained", "optimizer", "data"])
def test_folded_weights_follow_changes(source, folds):
    plain = disturb(block().double()).eval()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 16, 9, 9, dtype=torch.float64)
    assert_close("before", fused(x), plain(x))
    for model in (plain, fused):
        torch.manual_seed(1)
        if source == "eps":
            model[1][1].eps = 0.5
        elif source == "replaced":
            model[1][0].weight = nn.Parameter(torch.randn(96, 1, 3, 3, dtype=torch.float64), requires_grad=False)
        elif source == "loaded":
            model.load_state_dict({k: t + 1 if t.is_floating_point() else t for k, t in model.state_dict().items()})
        elif source == "trained":
            model.train()(x)
            model.eval()
        elif source == "optimizer":
            # PyTorch does not count its steps
            optimizer = torch.optim.SGD(model.requires_grad_(True).parameters(), 0.1, fused=True)
            model(x).square().sum().backward()
            optimizer.step()
            model.requires_grad_(False)
        elif source == "data":
            # the allocator could give the second result the memory of the first weights
            for _ in range(2):
                model[1][0].weight.data = model[1][0].weight.data * 2
        else:
            with torch.no_grad():
                model.get_parameter(source).add_(1) if "running" not in source else model.get_buffer(source).add_(1)
    assert_close("after", fused(x), plain(x))
    assert len(folds) == 2


def test_parameters_may_become_inference_tensors(folds):
    plain = disturb(block()).eval()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 16, 9, 9)
    fused(x)
    with torch.inference_mode():
        for model in (plain, fused):
            model.load_state_dict({k: t + 1 for k, t in model.state_dict().items()}, assign=True)
        assert_close("result", fused(x), plain(x).double(), FLOAT32_CHAIN)
    assert folds == [3]


def test_folded_residuals():
    """One that the result has no room for is broadcast."""

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = unit()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    plain = disturb(Added().double()).eval().requires_grad_(False)
    fused = copy.deepcopy(plain)
    assert nasfast.fuse(fused).chains[0].residual
    for shape in ((2, 4, 9, 9), (2, 4, 1, 1)):
        x = torch.randn(shape, dtype=torch.float64)
        before = x.clone()
        assert_close("result", fused(x), plain(x))
        assert torch.equal(x, before)


# channels and pixels of `block`: results below and above what the rule asks for
@pytest.mark.parametrize(("pixels", "runs"), [(8, False), (56, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_decides_by_size(pixels, runs, dtype, executed):
    model = block().to(dtype)
    for i in (0, 1, 2):
        model[i][1].requires_grad_()
    report = nasfast.fuse(model)
    stages = Binding(model.forward).chains[0].stages
    least = rule.least_results(torch.empty(0, dtype=dtype), stages, trains=False, recorded=False)
    assert f"fused where the convolutions give {least:,} numbers" in report.chains[0].runs
    exact = copy.deepcopy(model).double()
    nasfast.unfuse(exact)
    x = torch.randn(4, 16, pixels, pixels).to(dtype)
    results = 4 * pixels**2 * (96 + 96 + 32 // 4)
    assert (results >= least) == runs
    for _ in range(2):
        tolerance = BFLOAT16_CHAIN if dtype == torch.bfloat16 else FLOAT32_CHAIN
        assert_close("result", model(x), exact(x.double()), tolerance)
    assert executed == [(3, False)] * (2 if runs else 0)


@pytest.mark.parametrize(
    ("sizes", "settings", "dtype", "least"),
    [
        ((4, 4, 3), {"groups": 4, "padding": 1}, torch.float32, 100_000),
        ((4, 4, 1), {"stride": 2}, torch.float32, 2_000_000),
        ((3, 8, 3), {}, torch.float32, 2_000_000),
        ((192, 8, 1), {}, torch.float32, 100_000),
        ((191, 8, 1), {}, torch.bfloat16, 100_000),
        ((192, 8, 1), {}, torch.bfloat16, 2_000_000),
        ((192, 192, 3), {"groups": 192, "padding": 1}, torch.bfloat16, 100_000),
    ],
    ids=["depthwise", "strided pointwise", "dense", "pointwise", "shallow bf16", "deep bf16", "depthwise bf16"],
)
def test_chains_of_the_operators_own_convolutions_pay_earlier(sizes, settings, dtype, least):
    model = nn.Sequential(conv(*sizes, **settings), nn.BatchNorm2d(sizes[1])).requires_grad_(False).to(dtype)
    assert f"give {least:,} numbers" in nasfast.fuse(model).chains[0].runs


def test_a_type_without_operator_runs_on_pytorch(executed):
    model = block().half().train()
    report = nasfast.fuse(model)
    assert report.backend == "reference (float16 on cpu)"
    assert [chain.runs for chain in report.chains] == ["on PyTorch: the fused operator is not faster in float16 on cpu"]
    model(torch.randn(4, 16, 56, 56).half())
    assert executed == []


def test_what_trains_counts_at_the_next_call(executed):
    model = block()[:2]
    nasfast.fuse(model)
    x = torch.randn(2, 16, 52, 52)
    model(x)
    assert len(executed) == 1
    model.requires_grad_(True)
    model(x)
    assert len(executed) == 1
    model.requires_grad_(False)
    model(x)
    assert len(executed) == 2
    model.eval()(x)
    assert len(executed) == 2


class Joined(nn.Module):
    """A layer like DenseNet's: it takes a tensor or several tensors, and is no well-known block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = conv(16, 32, 1), nn.BatchNorm2d(32), nn.ReLU()

    def forward(self, x: Tensor | list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        x = x if isinstance(x, Tensor) else torch.cat(x, 1)
        return self.act(self.norm(self.conv(x)))


# the chain has 115,200 and 131,072 results
@pytest.mark.parametrize(("pixels", "pays"), [(30, False), (32, True)])
@pytest.mark.parametrize("training", [False, True])
def test_small_chains_are_not_recorded(training, pixels, pays, folds, executed, monkeypatch):
    monkeypatch.setattr(rule, "LEAST_RECORDED", RECORDED)
    plain = disturb(Joined()).train(training).requires_grad_(False)
    fused = copy.deepcopy(plain)
    report = nasfast.fuse(fused)
    assert "give 120,000 numbers" in report.chains[0].runs
    assert any(note.startswith("1 chain in a forward that is not well known") for note in report.notes)
    x = torch.randn(4, 16, pixels, pixels)
    for _ in range(2):
        assert_close("result", fused(x), plain(x).double(), FLOAT32_CHAIN)
    assert folds == [1] * (pays and not training)
    assert executed == [(1, False)] * (2 * (pays and training))


@pytest.mark.parametrize("operator", [0.5, 2.0])
def test_other_instructions_are_measured_in_the_first_forward(operator, executed, monkeypatch):
    """The clock says how long the operator takes, when PyTorch takes 1."""
    times = []
    monkeypatch.setattr(rule, "_seconds", lambda run, *_: times.append(run) or (operator if len(times) % 2 else 1.0))
    monkeypatch.setattr(rule._native.extension, "isa", lambda: "another")
    model = block().train()
    report = nasfast.fuse(model)
    assert report.chains[0].runs.startswith("fused or on PyTorch, whichever the first forward measures")
    for twin in (lambda: model, lambda: model, lambda: copy.deepcopy(model)):
        executed.clear()
        twin()(torch.randn(2, 16, 9, 9))
        assert executed == ([(3, False)] if operator < 1 else [])
    assert len(times) == 12


def test_checkpoints_do_not_see_what_is_measured(monkeypatch):
    """They count what is saved, and selective ones keep the results of operators."""
    monkeypatch.setattr(rule._native.extension, "isa", lambda: "avx2")
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    plain = nn.Sequential(unit())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    for model in (plain, fused):
        with Mode():
            y = checkpoint(model, torch.ones(2, 4, 5, 5), use_reentrant=False)
        y.sum().backward()
    assert seen.count(torch.ops.aten.convolution.default) <= 2


def test_an_example_decides_by_time(monkeypatch, executed):
    """The clock says that Candidates with kernel 5 are slower on the operator."""
    timed = []

    def seconds(run, leaves, device):
        before = len(executed)
        run()
        on_operator = len(executed) > before
        timed.append(on_operator)
        return 2.0 if on_operator and len(timed) > 12 else 1.0 if not on_operator else 0.5

    monkeypatch.setattr(rule, "_seconds", seconds)
    monkeypatch.setenv("NASFAST_BACKEND", "reference")
    model = disturb(nn.Sequential(Candidate(3), unit(), Candidate(5)).double()).requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    torch.manual_seed(5)
    random = torch.random.get_rng_state()
    report = nasfast.fuse(model, x)
    assert torch.equal(torch.random.get_rng_state(), random)
    check_same(dict(model.state_dict()), dict(before))
    assert timed[:4] == [True, False, True, False]
    assert [chain.example for chain in report.chains] == ["fused", "on PyTorch", "on PyTorch"]
    assert "for inputs like the example, in the present mode:\n  1 chain fused: 0\n" in str(report)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        executed.clear()
        twin(x)
        assert executed == [(3, True)]
    executed.clear()
    model(x[:1])
    assert executed == [], "another shape: the rule decides"


@pytest.mark.parametrize(("seconds", "how"), [(0.5, "with folded BatchNorms"), (2.0, "on PyTorch")])
def test_an_example_in_eval_mode_measures_folding(seconds, how, monkeypatch, folds):
    """The clock says that folded chains take this much of PyTorch's time."""
    turns = []
    monkeypatch.setattr(rule, "_seconds", lambda *_: turns.append(0) or (seconds if len(turns) % 2 else 1.0))
    model = block().eval()
    x = torch.randn(2, 16, 9, 9)
    report = nasfast.fuse(model, x)
    assert report.chains[0].example == how
    folds.clear()
    model(x)
    assert folds == ([3] if how == "with folded BatchNorms" else [])


def test_the_report_says_that_an_example_reached_no_chain():
    class Skipping(Switch):
        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            return x if skip else super().forward(x)

    report = nasfast.fuse(Skipping(), (torch.randn(2, 4, 9, 9), True))
    assert [chain.example for chain in report.chains] == [""]
    assert "the example reached no chain that could be measured" in report.notes


def test_an_example_that_the_model_refuses_leaves_it_unfused():
    model = block()
    with pytest.raises(RuntimeError, match="expected input"):
        nasfast.fuse(model, torch.randn(2, 3, 20, 20))
    assert nasfast.unfuse(model) == 0
    with pytest.raises(ValueError, match="leave it out with only_faster=False"):
        nasfast.fuse(model, torch.randn(2, 16, 20, 20), only_faster=False)
    with pytest.raises(
        TypeError, match="fuse: example must be a tensor, or a list of the forward's arguments, got str"
    ):
        nasfast.fuse(model, "images")


def test_bfloat16_modules_run_fused(executed):
    plain = set_mode(disturb(make("mobilenet_v2").double()), "frozen convolutions")
    fused, eager = copy.deepcopy(plain).bfloat16(), copy.deepcopy(plain).bfloat16()
    report = nasfast.fuse(fused, only_faster=False)
    assert report.backend == "cpu (bfloat16 on cpu)"
    x = torch.randn(8, 3, 96, 96)
    want, got, usual = (observe(m, x.to(next(m.parameters()).dtype)) for m in (plain, fused, eager))
    assert sum(stages for stages, _ in executed) == report.fused
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in usual.items()}
    assert median_error(got, want) <= 1.1 * median_error(usual, want)


def test_errors_say_what_to_do():
    model = nn.Sequential(unit(), unit())
    nasfast.fuse(model)
    assert "the model was fused before: what was measured is forgotten" in nasfast.fuse(model).notes
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot compile .* call nasfast.unfuse\(model\) before"):
        torch.jit.script(model)
    with pytest.raises(ValueError, match="compiled by torch.compile, which fuses by itself; call fuse on a module"):
        nasfast.fuse(torch.compile(model))
