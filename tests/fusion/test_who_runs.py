"""Who runs a forward: a captured graph, or the module's own forward where a user, a tracer or a mode must see it."""

import copy
import functools
import inspect
import pickle
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fused_models import Asserting, Candidate, Checking, check_same, disturb, fuse_all, observe, unit
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torch.ao.quantization.quantize_fx import prepare_qat_fx
from torch.fx.experimental import optimization
from torch.overrides import TorchFunctionMode
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.mobilenetv2 import InvertedResidual

import nasfast
from nasfast.fusion import region
from nasfast.fusion.region import is_fused

X = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))


def twins(model: nn.Module, **settings) -> tuple[nn.Module, nn.Module]:
    fused = copy.deepcopy(model)
    nasfast.fuse(fused, only_faster=False, **settings)
    return model, fused


def blocks() -> nn.Module:
    return disturb(nn.Sequential(InvertedResidual(4, 4, 1, 2), InvertedResidual(4, 4, 1, 3)))


TRACERS = {
    "symbolic_trace": torch.fx.symbolic_trace,
    "create_feature_extractor": lambda m: create_feature_extractor(m, {"1.conv": "features"}),
    "folding": optimization.fuse,
    "quantization": lambda m: prepare_qat_fx(m.train(), get_default_qat_qconfig_mapping("x86"), (X,)).eval(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_tracers_see_the_modules_own_forward(tracer):
    plain, fused = twins(blocks().eval())
    want, got = (TRACERS[tracer](model)(X) for model in (plain, fused))
    want, got = (y["features"] if isinstance(y, dict) else y for y in (want, got))
    torch.testing.assert_close(got, want)
    assert is_fused(fused) and not fused.forward.region.own


SWITCHES = {
    "disable": lambda: torch._dynamo.config.patch(disable=True),
    "error_on_recompile": lambda: torch._dynamo.config.patch(error_on_recompile=True),
    "recompile_limit": lambda: torch._dynamo.config.patch(recompile_limit=1),
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
    "fail_on_recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "eager_on_recompile": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "eager_then_compile": lambda: torch.compiler.set_stance("eager_then_compile"),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_of_the_user(switch, executed):
    plain, fused = twins(disturb(Candidate(3)))
    for first, second in ((True, False), (False, True)):
        with SWITCHES[switch]():
            torch.testing.assert_close(fused.train(first)(X), plain.train(first)(X))
            torch.testing.assert_close(fused.train(second)(X[:1]), plain.train(second)(X[:1]))
    executed.clear()
    torch.testing.assert_close(fused.train()(X), plain.train()(X))
    # a switch is no reason to run unfused behind it
    assert executed


def cannot_capture(*_, **__):
    raise RecursionError("of the compiler")


def test_whatever_a_capture_raises_leads_to_the_modules_own_forward(monkeypatch):
    monkeypatch.setattr(region, "fuse_graph", cannot_capture)
    plain = disturb(Candidate(3).double())
    fused = copy.deepcopy(plain)
    report = fuse_all(fused)
    check_same(observe(fused, X.double(), 2), observe(plain, X.double(), 2))
    for word in ("cannot be captured in training mode", "of the compiler"):
        assert word in report.left[0].reason


class Trying(Candidate):
    """Its forward takes another way if the first one raises."""

    first = staticmethod(lambda y: y)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        try:
            return type(self).first(y)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            return y * len(type(error).__name__)


@pytest.mark.parametrize(
    "first",
    [
        lambda y: y + y[:, 9].mean(),
        lambda y: y.softmax(7),
        lambda y: torch.cat([y, y[:, :, 1:]], 1),
        lambda y: y.transpose(1, 2).view(y.shape[0], -1),
        lambda y: torch.add(y, "1"),
        lambda y: nn.functional.batch_norm(y.mean((2, 3), keepdim=True)[:1], None, None, training=True),
        lambda y: nn.functional.batch_norm(y, torch.zeros(3), torch.ones(3)),
    ],
    ids=["index", "dimension", "cat", "view", "type", "one value", "channels"],
)
def test_exceptions_that_a_forward_catches(first):
    cls = type("Own", (Trying,), {"first": staticmethod(first)})
    plain, fused = twins(disturb(cls(3)))
    for x in (X, X[:1], X):
        torch.testing.assert_close(fused(x), plain(x))
        torch.testing.assert_close(dict(fused.named_buffers()), dict(plain.named_buffers()))


def raised(model: nn.Module, x: Tensor) -> str:
    try:
        model(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("make", [Asserting, lambda: Checking(3)], ids=["numbers", "sizes"])
def test_what_a_forward_asserts(make, executed):
    """Of numbers, TorchDynamo would make an operator that raises RuntimeError."""
    plain, fused = twins(disturb(make()))
    torch.testing.assert_close(fused(X), plain(X))
    assert executed and raised(fused, X[:, :3]) == "AssertionError: four channels"
    for x in (X * torch.nan, X[:, :3]):
        assert raised(fused, x) == raised(plain, x)
    torch.testing.assert_close(dict(fused.named_buffers()), dict(plain.named_buffers()), equal_nan=True)


class Refusing(Candidate):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.shape[2] > 5:
            raise IndexError(f"too large: {x.shape[2]}")
        return y


def test_exceptions_that_a_forward_raises():
    plain, fused = twins(disturb(Refusing(3)))
    for x in (X[..., :5, :5], X, X[..., :5, :5]):
        results = []
        for model in (plain, fused):
            try:
                results.append(model(x))
            except IndexError as error:
                results.append(f"{error} {error.__context__}")
        torch.testing.assert_close(*results) if isinstance(results[0], Tensor) else None
        assert isinstance(results[0], Tensor) or results[0] == results[1]
        torch.testing.assert_close(dict(fused.named_buffers()), dict(plain.named_buffers()))


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        # it needs the numbers, as a calibration does
        return result if func.__name__ != "conv2d" else result * min(1.0, float(result.detach().max()))


def test_function_modes_see_every_function(executed):
    plain, fused = twins(blocks())
    for _ in range(2):
        seen = []
        for model in (plain, fused):
            with Seen() as mode:
                y = model(X)
            seen.append((y, mode.names))
        torch.testing.assert_close(*[y for y, _ in seen])
        assert seen[0][1] == seen[1][1] and not executed
        fused(X), plain(X)
        assert executed
        executed.clear()
    with torch.device("cpu"):
        torch.testing.assert_close(fused(X), plain(X))
    assert executed


class Logged(Tensor):
    """A subclass that computes in `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_keep_their_type(executed):
    plain, fused = twins(blocks())
    assert type(fused(X.as_subclass(Logged))) is type(plain(X.as_subclass(Logged))) is Logged
    assert not executed


def test_a_fused_forward_is_like_a_bound_method(executed):
    plain, fused = twins(disturb(Candidate(3)).eval())
    want, forward = plain(X), fused.forward
    assert forward.__self__ is fused and forward == fused.forward
    for name in ("__name__", "__doc__", "__module__"):
        assert getattr(forward, name) == getattr(plain.forward, name)
    for read in (inspect.signature, inspect.getfullargspec, inspect.getsource):
        assert read(forward) == read(plain.forward)
    for made in (
        lambda: types.MethodType(forward.__func__, fused),
        lambda: functools.partial(forward.__func__, fused),
        lambda: copy.copy(forward),
        lambda: copy.deepcopy(forward),
        lambda: pickle.loads(pickle.dumps(forward)),
        lambda: copy.deepcopy(fused).forward.__func__.__get__(fused),
    ):
        executed.clear()
        torch.testing.assert_close(made()(X), want)
        assert executed
    assert copy.deepcopy(forward).__self__ is not fused


def test_a_forward_that_is_taken_apart_and_bound_again(executed):
    """As accelerate's `prepare` and `unwrap_model` do for mixed precision."""
    plain, fused = twins(disturb(Candidate(3)).eval())
    for model in (plain, fused):
        original = model.forward
        wrapped = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
        model.forward = types.MethodType(wrapped, model)
    torch.testing.assert_close(fused(X), plain(X), rtol=0.1, atol=0.1)
    for model in (plain, fused):
        function = model.forward
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        model.forward = types.MethodType(function, model)
    executed.clear()
    torch.testing.assert_close(fused(X), plain(X))
    assert executed and is_fused(fused)
    again = copy.deepcopy(fused)
    assert nasfast.unfuse(fused) == nasfast.unfuse(again) == 1
    torch.testing.assert_close(fused(X), original(X))


# F.batch_norm compares eps with 0, so that TorchDynamo captures none of NumPy
@pytest.mark.parametrize(("name", "number"), [("momentum", float), ("eps", float), ("momentum", np.float64)])
def test_schedules_of_numbers_of_batch_norms(name, number, executed):
    plain, fused = twins(disturb(nn.Sequential(unit(), unit()).double()))
    for step in range(8):
        for model in (plain, fused):
            for i, norm in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
                setattr(norm, name, number(0.5 / (1 + step + i)))
        executed.clear()
        check_same(observe(fused, X.double()), observe(plain, X.double()))
        assert executed
    assert len(fused.forward.region.graphs) <= 2


class Counting(nn.Module):
    """Counts its calls, and pads by a number that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.norm = unit(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.calls, self.padding = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(self.conv(F.pad(self.body(x), (self.padding,) * 4)))


@pytest.mark.parametrize("grows", [False, True])
def test_a_number_that_changes_at_every_call(executed, grows):
    """Pytorch 128319."""
    plain, fused = twins(Counting().eval())
    for step in range(6):
        plain.padding = fused.padding = 1 + step if grows else 1
        executed.clear()
        torch.testing.assert_close(fused(X), plain(X))
        assert executed
    assert fused.calls == 6
    assert len(fused.forward.region.graphs) == 3 and not fused.forward.region.own


@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_paddings_with_names(padding, mode):
    plain, fused = twins(unit(padding=padding, padding_mode=mode))
    torch.testing.assert_close(fused(X), plain(X))


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"inner": "typo"}, ValueError, "inner is 'typo'; it must be a function, or one of .*inductor"),
        ({"inner": 3}, TypeError, "inner must be the name of a backend or a function, got int"),
    ],
)
def test_what_fuse_refuses_leaves_the_model_as_it_was(settings, error, text):
    model = nn.Sequential(unit(), unit())
    before = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(error, match=text):
        nasfast.fuse(model, **settings)
    fuse_all(model)
    fused = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(error, match=text):
        nasfast.fuse(model, **settings)
    # also the forwards of an earlier call stay
    assert [dict(vars(m)) for m in model.modules()] == fused != before


@pytest.mark.usefixtures("native")
def test_an_instruction_set_that_there_is_not_is_refused(monkeypatch):
    def refuse(_):
        raise RuntimeError("NASFAST_ISA=avx2 is not compiled in")

    monkeypatch.setattr("nasfast.ops._native.Extension.isa", refuse)
    model = nn.Sequential(unit(), unit())
    with pytest.raises(RuntimeError, match="NASFAST_ISA=avx2 is not compiled in"):
        nasfast.fuse(model)
    assert not any(map(is_fused, model.modules()))


def test_an_error_inside_of_fuse_leaves_the_model_as_it_was(monkeypatch):
    monkeypatch.setattr("nasfast.fusion.api.FuseReport", cannot_capture)
    model = nn.Sequential(unit(), unit())
    with pytest.raises(RecursionError):
        nasfast.fuse(model)
    assert not any(map(is_fused, model.modules()))


def test_the_report_names_pretrained_statistics_that_are_not_used():
    model = nn.Sequential(unit(), unit()).requires_grad_(False)
    assert "statistics of an earlier training" not in str(nasfast.fuse(model))
    disturb(model)
    report = str(nasfast.fuse(model))
    assert "2 BatchNorms behind frozen convolutions have statistics of an earlier training and are in train" in report
    assert report.endswith("0.1, 1.1")
    assert "earlier training" not in str(nasfast.fuse(model.eval()))
