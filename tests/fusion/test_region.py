"""What TorchDynamo captures of a fused model: how often, what it guards, and what runs as before."""

import copy
import gc
import pickle
import random
import weakref
from collections import OrderedDict
from functools import wraps
from threading import Thread
from types import MethodType

import pytest
import torch
from fused_models import Candidate, check_same, conv, disturb, fuse_all, observe, unit
from tolerances import FLOAT32_CHAIN, assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.mobilenetv2 import InvertedResidual

import nasfast
from nasfast.fusion import region
from nasfast.fusion.region import FusedForward


@pytest.fixture
def captures(monkeypatch):
    """The modules that were captured, in order."""
    found = []
    compile_graph = region.Region.compile

    def record(self, graph_module, example_inputs, call):
        found.append(call.module)
        return compile_graph(self, graph_module, example_inputs, call)

    monkeypatch.setattr(region.Region, "compile", record)
    return found


def twins(model: nn.Module, **settings) -> tuple[nn.Module, nn.Module]:
    """The model, and a fused copy of it."""
    fused = copy.deepcopy(model)
    nasfast.fuse(fused, only_faster=False, **settings)
    return model, fused


class Paths(nn.Module):
    """A supernet that draws its path in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.draw = conv(4, 4, 1), nn.BatchNorm2d(4), random.Random(0)
        self.layers = nn.ModuleList(nn.ModuleList(map(Candidate, (3, 5, 7))) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x))
        for layer in self.layers:
            x = self.draw.choice(layer)(x)
        return x


def test_a_supernet_captures_each_block_once(captures):
    plain, fused = twins(disturb(Paths().double()))
    for _ in range(30):
        x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
        check_same(observe(fused, x), observe(plain, x))
    assert len(captures) == len(set(captures)) == 9


def test_one_capture_serves_all_sizes(captures):
    """The batch is the only one, or not; a map has one pixel, or not."""
    plain, fused = twins(disturb(nn.Sequential(InvertedResidual(4, 4, 2, 2), *unit()).double()))
    for sizes in ((1, 4, 8, 8), (2, 4, 8, 8), (3, 4, 8, 9), (5, 4, 12, 12), (2, 4, 9, 5), (1, 4, 9, 5), (7, 4, 1, 2)):
        x = torch.randn(sizes, dtype=torch.float64)
        check_same(observe(fused, x), observe(plain, x))
    assert len(captures) == 1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_usual_loop_captures_once_per_mode(layout, captures):
    """Training, its last batches of few images and of one, validation and its last batches, twice.

    PyTorch has other convolutions for less than 16 images, and knows no layout of one image for certain.
    """
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    _, fused = twins(disturb(nn.Sequential(InvertedResidual(4, 8, 1, 2), *head)))
    fused.to(memory_format=layout)
    for _ in range(2):
        for batch in (20, 4, 1):
            fused.train()(torch.randn(batch, 4, 8, 8).contiguous(memory_format=layout)).sum().backward()
        for batch in (18, 6, 1):
            with torch.no_grad():
                fused.eval()(torch.randn(batch, 4, 8, 8).contiguous(memory_format=layout))
    assert len(captures) == 2


@pytest.mark.parametrize("parts", [1, 2])
def test_a_copy_has_its_own_weights(parts, captures):
    _, fused = twins(disturb(nn.Sequential(*map(Candidate, (3, 5)[:parts])).double()).eval())
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    want = fused(x)
    copied = copy.deepcopy(fused)
    torch.testing.assert_close(copied(x), want)
    assert len(captures) == 2
    with torch.no_grad():
        copied[0].expand.weight.zero_()
    assert not torch.allclose(copied(x), want)
    torch.testing.assert_close(fused(x), want)
    loaded = pickle.loads(pickle.dumps(fused))
    torch.testing.assert_close(loaded(x), want)
    assert isinstance(loaded.forward, FusedForward) and len(captures) == 3


@pytest.mark.parametrize("make", [Paths, lambda: Candidate(3)], ids=["cannot be traced", "is captured"])
def test_a_deleted_model_is_freed_at_once(make):
    _, fused = twins(make())
    for module in (fused, fused.train(False)):
        module(torch.randn(2, 4, 7, 7)).sum().backward()
    parameters = [weakref.ref(parameter) for parameter in fused.parameters()]
    gc.disable()
    try:
        nasfast.fuse(fused)
        del fused, module
        assert [parameter() for parameter in parameters] == [None] * len(parameters)
    finally:
        gc.enable()


class Counting(Candidate):
    """Its forward reads what changes at every call."""

    calls = ""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += "x"
        return super().forward(x) + len(self.calls)


class Outer(nn.Module):
    """It owns a chain, and changes its way."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv, self.bn, self.inner, self.way = conv(4, 4, 1), nn.BatchNorm2d(4), inner, ""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.bn(self.conv(x))) * len(self.way)


def test_a_forward_with_ever_new_ways_runs_as_before(captures):
    plain, fused = twins(disturb(Outer(Counting(3)).double()))
    report = nasfast.fuse(fused, only_faster=False)
    for way in range(12):
        plain.way = fused.way = "x" * (way * 3 % 11)
        x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
        check_same(observe(fused, x), observe(plain, x))
    assert 3 <= len(captures) <= 2 * region._MAX_CAPTURES
    assert "captured no more, it takes other ways for the same input" in str(report)


class Data(Candidate):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class CheckpointedBody(Candidate):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(CheckpointedBody):
    reentrant = True


class WithFunction(Candidate):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.dw(Cubed.apply(self.bn1(self.expand(x)))))[:, :4] + x


class Printing(Candidate):
    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return super().forward(x)


@pytest.mark.parametrize("cls", [CheckpointedBody, Reentrant, WithFunction, Printing, Data])
def test_what_forwards_call_in_between_is_right(cls):
    plain, fused = twins(disturb(nn.Sequential(cls(3), Candidate(3)).double()))
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    for _ in range(2):
        check_same(observe(fused, x, steps=2), observe(plain, x, steps=2))


def test_a_region_that_cannot_be_captured_says_why():
    model = nn.Sequential(CheckpointedBody(3))
    model[0].reentrant = False
    plain = copy.deepcopy(model)
    model[0].__class__ = Candidate
    report = fuse_all(model)
    model[0].__class__ = CheckpointedBody
    x = torch.randn(2, 4, 7, 7)
    torch.testing.assert_close(model(x), plain(x))
    assert report.fused == 0
    assert "the forward of 0 runs on PyTorch: it cannot be captured" in str(report)


def flat_memory(m: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(m.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector, m.parameters())
    m(torch.ones(1, 4, 8, 8))
    vector.mul_(0.5)


def fused_optimizer(m: nn.Module) -> None:
    m.requires_grad_()
    with torch.enable_grad():
        m(torch.ones(1, 4, 8, 8)).square().sum().backward()
    torch.optim.SGD(m.parameters(), lr=0.1, fused=True).step()


def other_owner(m: nn.Module) -> None:
    other = nn.BatchNorm2d(4)
    other._buffers.update(m[0][1]._buffers)
    other(torch.randn(4, 4, 3, 3) + 5)


WRITES = {
    "flat memory": flat_memory,
    "fused optimizer": fused_optimizer,
    "data": lambda m: m[0][0].weight.data.mul_(2),
    "NumPy": lambda m: m[0][0].weight.detach().numpy().__imul__(2),
    "DLPack": lambda m: torch.from_dlpack(m[0][1].running_var.detach()).mul_(4),
    "batch_norm": lambda m: nn.functional.batch_norm(
        torch.randn(4, 4, 3, 3) + 5, m[0][1].running_mean, m[0][1].running_var, training=True
    ),
    "another module": other_owner,
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "swap_tensors": lambda m: torch.utils.swap_tensors(m[0][0].weight, nn.Parameter(torch.randn(4, 4, 3, 3))),
    "a new parameter": lambda m: setattr(m[0][0], "weight", nn.Parameter(torch.randn(4, 4, 3, 3))),
}


@pytest.mark.parametrize("only_faster", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_shows_in_the_next_forward(write, only_faster):
    model = disturb(nn.Sequential(unit(), unit())).eval()
    nasfast.fuse(model, only_faster=only_faster)
    x = torch.randn(2, 4, 8, 8)
    for _ in range(2):
        with torch.no_grad():
            model(x)
        WRITES[write](model)
        plain = copy.deepcopy(model)
        nasfast.unfuse(plain)
        with torch.no_grad():
            assert_close(write, model(x), plain(x).double(), FLOAT32_CHAIN)


class Patchable(InvertedResidual):
    """A class that nothing else here uses."""


@pytest.mark.parametrize("cls", [Patchable, nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ReLU6])
@pytest.mark.parametrize("when", ["before its first forward", "later"])
def test_a_forward_patched_on_a_class_runs(cls, when, monkeypatch):
    plain, fused = twins(disturb(Patchable(4, 4, 1, 2).double()))
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    if when == "later":
        assert_close("before", fused(x), plain(x))
    original = cls.forward
    monkeypatch.setattr(cls, "forward", wraps(original)(lambda module, *args: 2 * original(module, *args)))
    assert_close("patched", fused(x), plain(x))


@pytest.mark.parametrize("place", range(1, 6))
def test_hooks_in_a_new_dictionary_fire(place, executed):
    """Some libraries replace the dictionary in order to remove or to set hooks."""
    _, model = twins(InvertedResidual(4, 4, 1, 2).double().eval())
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    model(x)
    assert len(executed) == 1
    seen = []
    module = list(model.modules())[place]
    module._forward_hooks = OrderedDict({0: lambda *_: seen.append(place)})
    model(x)
    assert seen == [place]
    module._forward_hooks = OrderedDict()
    model(x)
    assert seen == [place] and len(executed) == 2


def test_a_held_forward_runs_after_unfuse_and_subclasses_run_as_before(executed):
    class Other(Tensor):
        pass

    plain, model = twins(InvertedResidual(4, 4, 1, 2).double().eval())
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    assert_close("subclass", model(x.as_subclass(Other)).as_subclass(Tensor), plain(x))
    held = model.forward
    nasfast.unfuse(model)
    assert_close("held", held(x), plain(x))


def test_views_behind_a_chain_see_pytorchs_layout():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = unit()

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            return y.view(y.shape[0], -1)

    plain, fused = twins(disturb(Flat().double()))
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    check_same(observe(fused, x), observe(plain, x))


@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6, nn.Hardswish])
def test_nan_reaches_the_result(act):
    plain, fused = twins(disturb(unit(act())).eval())
    x = torch.randn(1, 4, 8, 8)
    x[0, 1, 3, 3] = torch.nan
    with torch.no_grad():
        assert torch.equal(fused(x).isnan(), plain(x).isnan())


def test_where_too_little_pays_the_forward_runs_itself(captures, monkeypatch):
    """It is decided before the first call of a kind, so that equal calls give equal numbers."""
    asked = []
    is_watched = region._is_watched
    monkeypatch.setattr(region, "_is_watched", lambda values: asked.append(1) or is_watched(values))
    plain = disturb(nn.Sequential(unit(), unit())).requires_grad_(False)
    fused = copy.deepcopy(plain)
    report = nasfast.fuse(fused)
    x = torch.randn(2, 4, 8, 8)
    for _ in range(5):
        assert torch.equal(fused(x), plain(x))
    # the next calls look at nothing
    assert len(asked) == len(captures) == 1
    assert str(report).startswith("last forward on (2, 4, 8, 8): 0 of 1 chain ran fused")
    fused(torch.randn(2, 4, 8, 9))
    assert (len(asked), len(captures)) == (2, 1)


def test_what_trains_counts_where_too_little_pays(captures):
    fused = nn.Sequential(unit(), unit()).requires_grad_(False)
    nasfast.fuse(fused)
    x = torch.randn(2, 4, 8, 8)
    for trains in (False, True, False, True):
        fused.requires_grad_(trains)
        fused(x)
    assert len(captures) == 2
    fused[0][1].eval()
    fused(x)
    assert len(captures) == 3
    assert len(fused.forward.region._alone[fused].kinds) == 3


def test_where_too_little_pays_modules_inside_have_their_own_forward():
    fused = nn.Sequential(Candidate(3), Candidate(3)).requires_grad_(False)
    nasfast.fuse(fused)
    x, found = torch.randn(2, 4, 8, 8), []
    fused(x)

    def note(module: nn.Module, _: object) -> None:
        found.append("forward" in vars(module))
        if len(found) == 4:
            raise IndexError("the last call")

    for module in fused:
        module.register_forward_pre_hook(note)
    fused(x)
    with pytest.raises(IndexError, match="the last call"):
        fused(x)
    assert found == [False] * 4
    assert all(isinstance(module.forward, FusedForward) for module in (fused, *fused))
    fused[0].forward = (own := lambda x: x + 1)
    fused(x)
    assert fused[0].forward is own


def test_where_too_little_pays_a_forward_that_is_bound_again_runs():
    plain = disturb(nn.Sequential(Candidate(3), Candidate(3))).requires_grad_(False)
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    for model in (plain, fused):
        inner = model[0].forward.__func__
        model[0].forward = MethodType(wraps(inner)(lambda module, x, inner=inner: inner(module, x) + 1), model[0])
    for _ in range(3):
        x = torch.randn(2, 4, 8, 8)
        assert torch.equal(fused(x), plain(x))


def test_where_too_little_pays_in_two_threads():
    plain = disturb(nn.Sequential(*map(Candidate, (3, 5, 3, 5)))).requires_grad_(False).eval()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x, results = torch.randn(2, 4, 8, 8), []
    threads = [Thread(target=lambda: results.extend(fused(x) for _ in range(50))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 100 and all(torch.equal(result, plain(x)) for result in results)
    assert all(isinstance(module.forward, FusedForward) for module in (fused, *fused))
