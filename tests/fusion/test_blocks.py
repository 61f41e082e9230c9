"""Well-known blocks run without their Python code: what they compute, and which changes they notice."""

import copy
import functools
import weakref
from collections import OrderedDict

import pytest
import torch
from fused_models import Switch, check_same, disturb, observe, unit
from tolerances import assert_close
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock

import nasfast


def block() -> InvertedResidual:
    """Three stages in a Sequential, and an addition."""
    return disturb(InvertedResidual(4, 4, 1, 2).double())


def basic_block() -> BasicBlock:
    return disturb(BasicBlock(4, 4).double())


class Method(BasicBlock):
    """Has a method in place of a submodule."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        del self.relu

    def relu(self, x: Tensor) -> Tensor:
        return functional.leaky_relu(x, 0.3)


class Flag(InvertedResidual):
    """Always adds."""

    @property
    def use_res_connect(self) -> bool:
        return True

    @use_res_connect.setter
    def use_res_connect(self, value: bool) -> None:
        pass


class Part(nn.Sequential):
    """Leaves out its last child."""

    def __iter__(self):
        return iter(list(self._modules.values())[:-1])


@pytest.mark.parametrize(
    "build", [Method, lambda: Flag(4, 4, 1, 2), lambda: Part(unit(), nn.Tanh())], ids=["method", "flag", "children"]
)
def test_subclasses_run_themselves(build):
    plain = disturb(build().double()).train()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    check_same(observe(fused, x), observe(plain, x))


def test_a_forward_that_is_held_runs_after_unfuse():
    model, x = basic_block().eval(), torch.randn(2, 4, 9, 9, dtype=torch.float64)
    want = model(x)
    nasfast.fuse(model, only_faster=False)
    held = model.forward
    nasfast.unfuse(model)
    torch.testing.assert_close(held(x), want)


def test_blocks_run_again_after_hooks_and_pruning(executed):
    plain = disturb(nn.Sequential(unit(), unit()).double())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    handle = fused[0][1].register_forward_hook(lambda *_: None)
    fused(x), plain(x)
    handle.remove()
    for change in (lambda m: None, lambda m: prune.l1_unstructured(m[0][0], "weight", 0.5)):
        change(plain), change(fused)
        check_same(observe(fused, x), observe(plain, x))
    for model in (plain, fused):
        prune.remove(model[0][0], "weight")
    executed.clear()
    check_same(observe(fused, x), observe(plain, x))
    assert len(executed) == len(fused.forward.chains)


class Patchable(InvertedResidual):
    """A class that nothing else here uses."""


@pytest.mark.parametrize(("training", "when"), [(True, "before its first forward"), (False, "later")])
@pytest.mark.parametrize("cls", [Patchable, nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.ReLU6, "nn.Conv2d's method"])
def test_a_forward_patched_on_a_class_runs(cls, when, training, monkeypatch):
    cls, name = (nn.Conv2d, "_conv_forward") if isinstance(cls, str) else (cls, "forward")
    plain = disturb(Patchable(4, 4, 1, 2).double()).train(training).requires_grad_(training)
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=not training)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    if when != "before its first forward":
        assert_close("before", fused(x), plain(x))
    original = getattr(cls, name)
    # a decorator may keep the name of the original
    keep_name = functools.wraps(original) if training else lambda function: function
    monkeypatch.setattr(cls, name, keep_name(lambda module, *args: 2 * original(module, *args)))
    assert_close("patched", fused(x), plain(x))


@pytest.mark.parametrize("build", [block, lambda: Switch().double()], ids=["block", "recorded"])
@pytest.mark.parametrize("place", range(1, 6))
def test_hooks_in_a_new_dictionary_fire(place, build, folds):
    """Some libraries replace the dictionary in order to remove or to set hooks."""
    model = build().eval().requires_grad_(False)
    nasfast.fuse(model)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    model(x)
    assert len(folds) == 1
    seen = []
    module = list(model.modules())[place]
    module._forward_hooks = OrderedDict({0: lambda *_: seen.append(place)})
    model(x)
    assert seen == [place]
    module._forward_hooks = OrderedDict()
    model(x)
    assert seen == [place] and len(folds) == 2


def test_blocks_free_what_nothing_reads_again():
    model = nn.Sequential(*unit(), nn.MaxPool2d(2), nn.Flatten()).eval()
    nasfast.fuse(model)
    results, alive = [], []
    model[3].register_forward_pre_hook(lambda _, args: results.append(weakref.ref(args[0])))
    model[4].register_forward_pre_hook(lambda *_: alive.append(results[0]() is not None))
    with torch.no_grad():
        model(torch.randn(2, 4, 8, 8))
    assert alive == [False] and model.forward._binding.block is not None


def test_a_tensor_that_is_no_tensor_runs_the_own_forward(executed):
    class Other(Tensor):
        pass

    model = block().eval()
    nasfast.fuse(model, only_faster=False)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    want = model(x)
    executed.clear()
    assert_close("result", model(x.as_subclass(Other)).as_subclass(Tensor), want)
    assert executed == []
