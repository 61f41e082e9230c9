"""Programs in place of the forwards of modules: what they are for, and what they notice."""

import copy
import weakref
from collections import OrderedDict

import pytest
import torch
from fused_models import MODELS, Switch, check_same, disturb, make, observe, set_mode, unit
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn.utils import prune

import nasfast
from nasfast.fusion import forward


@pytest.fixture
def no_own_forward(monkeypatch):
    """Every forward of a module that owns chains must run by its program."""

    def refuse(*_):
        raise AssertionError("the module's own forward ran")

    monkeypatch.setattr(forward, "run_own_forward", refuse)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_run_by_programs(name, no_own_forward, executed):
    plain = set_mode(disturb(make(name).double()), "frozen convolutions")
    fused = copy.deepcopy(plain)
    report = nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for mode in (True, False):
        executed.clear()
        check_same(observe(fused.train(mode), x), observe(plain.train(mode), x))
        assert sum(stages for stages, _ in executed) == report.fused


def set_down(model: Switch) -> None:
    torch.manual_seed(2)
    model.down = unit().double()


CHANGES = {
    "nothing": lambda m: None,
    "attribute": lambda m: setattr(m, "skip", False),
    "submodule": set_down,
    "activation": lambda m: m.body[0].__setitem__(2, nn.Tanh()),
    "order": lambda m: m.body.__setitem__(0, m.body[1]),
    "inserted": lambda m: m.body.insert(1, nn.Tanh()),
    "dilation": lambda m: [setattr(m.body[0][0], name, (2, 2)) for name in ("dilation", "padding")],
    "forward": lambda m: setattr(m.body[0], "forward", lambda x: x * 2),
    "hook": lambda m: m.body[0].register_forward_hook(lambda module, args, y: y * 2),
    "eps": lambda m: setattr(m.body[0][1], "eps", 0.3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("training", [True, False])
def test_programs_notice_changes(change, training, executed):
    torch.manual_seed(0)
    plain = disturb(Switch().double()).train(training)
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    check_same(observe(fused, x), observe(plain, x))
    assert executed
    CHANGES[change](plain), CHANGES[change](fused)
    want = observe(plain, x)
    check_same(observe(fused, x), want)


@pytest.fixture
def bindings(monkeypatch):
    """Everything that a fused forward has bound to its module."""
    bound = []

    class Recorded(forward._Binding):
        def __init__(self, *args):
            bound.append(self)
            super().__init__(*args)

    monkeypatch.setattr(forward, "_Binding", Recorded)
    return bound


def test_programs_run_again_after_hooks_and_pruning(executed, bindings):
    plain = disturb(nn.Sequential(unit(), unit()).double())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    handle = fused[0][1].register_forward_hook(lambda *_: None)
    for _ in range(3):
        fused(x), plain(x)
    assert len(bindings) == 1, "a hook does not bind the program again at each forward"
    handle.remove()
    for change in (lambda m: None, lambda m: prune.l1_unstructured(m[0][0], "weight", 0.5)):
        change(plain), change(fused)
        check_same(observe(fused, x), observe(plain, x))
    for model in (plain, fused):
        prune.remove(model[0][0], "weight")
    executed.clear()
    check_same(observe(fused, x), observe(plain, x))
    assert len(executed) == len(fused.forward.chains)


def test_a_program_that_no_longer_fits_is_tried_once(bindings):
    model = Switch().eval()
    nasfast.fuse(model)
    x = torch.randn(2, 4, 9, 9)
    model(x)
    model.body.insert(1, nn.Tanh())
    for _ in range(3):
        model(x)
    assert [binding.program is not None for binding in bindings] == [True, False]
    del model.body[1]
    for _ in range(2):
        model(x)
    assert [binding.program is not None for binding in bindings] == [True, False, True]


class Patchable(Switch):
    """A class that nothing else here uses."""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("when", ["before its first forward", "later", "before a copy"])
@pytest.mark.parametrize("cls", [Patchable, nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ReLU])
def test_a_forward_patched_on_a_class_runs(cls, when, training, monkeypatch):
    plain = disturb(Patchable().double()).train(training).requires_grad_(training)
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=not training)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    if when != "before its first forward":
        assert_close("before", fused(x), plain(x))
    original = cls.forward
    monkeypatch.setattr(cls, "forward", lambda module, x: 2 * original(module, x))
    if when == "before a copy":
        fused = copy.deepcopy(fused)
    assert_close("patched", fused(x), plain(x))


@pytest.mark.parametrize("path", ["body", "body.0", "body.0.0", "body.0.1", "body.0.2"])
def test_hooks_in_a_new_dictionary_fire(path):
    """Some libraries replace the dictionary in order to remove or to set hooks."""
    model = Switch().eval().requires_grad_(False)
    nasfast.fuse(model)
    x = torch.randn(2, 4, 9, 9)
    model(x)
    seen = []
    module = model.get_submodule(path)
    module._forward_hooks = OrderedDict({0: lambda *_: seen.append(path)})
    model(x)
    assert seen == [path]
    module._forward_hooks = OrderedDict()
    model(x)
    assert seen == [path]
    assert model.forward._binding.program is not None


class Chooser(Switch):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Chooser.calls += 1
        return self.body(x) + x


class Counter(Switch):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) + x


@pytest.mark.parametrize("cls", [Chooser, Counter])
def test_a_forward_with_side_effects_has_no_program(cls):
    model = cls()
    nasfast.fuse(model, only_faster=False)
    assert not model.forward.programs
    before = model.calls
    for _ in range(3):
        model(torch.randn(2, 4, 9, 9))
    assert model.calls == before + 3


training = False


class Part(nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.dropout = None, False


class Borrower(nn.Module):
    """It has everything that its forward reads of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.down = unit(), unit(), Part(), None

    def scale(self, x: Tensor) -> Tensor:
        """What a changed part or global changes."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.b(self.a(x)))


class OfAPart(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        return x * 2 if self.drop.training else x


class OfALocal(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        drop = self.drop
        return x * 2 if drop.training else x


class ByGetattr(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        return x * 2 if getattr(self.drop, "training") else x  # noqa: B009


class OfEither(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        return x * 2 if (self.drop or self).training else x


class OfAnotherSelf(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        self = self.drop  # noqa: PLW0642
        return x * 2 if self.training else x


class AModule(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        return x if self.drop.down is None else x * 2


class LikeAFunction(Borrower):
    """F.dropout has the same name."""

    def scale(self, x: Tensor) -> Tensor:
        return x * 2 if self.drop.dropout else x


class LikeAFunctionOfALocal(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        drop = self.drop
        return x * 2 if drop.dropout else x


class LikeAFunctionByGetattr(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        return x * 2 if getattr(self.drop, "dropout") else x  # noqa: B009


class AGlobal(Borrower):
    def scale(self, x: Tensor) -> Tensor:
        return x * 2 if training else x


OF_OTHERS = [OfAPart, OfALocal, ByGetattr, OfEither, OfAnotherSelf, AModule, AGlobal]
OF_OTHERS += [LikeAFunction, LikeAFunctionOfALocal, LikeAFunctionByGetattr]


@pytest.mark.parametrize("cls", OF_OTHERS)
def test_names_of_the_module_that_are_read_of_something_else(cls, monkeypatch):
    plain = disturb(cls().double()).eval()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    assert_close("before", fused(x), plain(x))
    for model in (plain, fused):
        model.drop.train()
        model.drop.down, model.drop.dropout = nn.Identity(), True
    monkeypatch.setitem(globals(), "training", True)
    assert_close("after", fused(x), plain(x))


class Own(Borrower):
    """All of these are its own."""

    def scale(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        return x * 2 if self.training and getattr(self, "down") is None else x  # noqa: B009


def test_own_names_of_the_module_are_recognised(no_own_forward):
    plain = disturb(Own().double()).eval()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    for mode in (False, True):
        assert_close("result", fused.train(mode)(x), plain.train(mode)(x))


def test_programs_free_what_nothing_reads_again(no_own_forward):
    model = nn.Sequential(*unit(), nn.MaxPool2d(2), nn.Flatten()).eval()
    nasfast.fuse(model)
    results, alive = [], []
    model[3].register_forward_pre_hook(lambda _, args: results.append(weakref.ref(args[0])))
    model[4].register_forward_pre_hook(lambda *_: alive.append(results[0]() is not None))
    with torch.no_grad():
        model(torch.randn(2, 4, 8, 8))
    assert alive == [False]


def test_parts_of_a_program_can_be_unfused(executed):
    model = make("regnet_y_400mf").eval().requires_grad_(False).double()
    plain = copy.deepcopy(model)
    nasfast.fuse(model, only_faster=False)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    want = plain(x)
    model(x)
    chains = len(executed)
    undone = nasfast.unfuse(model.trunk_output[0][0].f)
    assert undone
    executed.clear()
    assert_close("result", model(x), want)
    assert len(executed) == chains - undone
