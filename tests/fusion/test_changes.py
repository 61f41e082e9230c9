"""Settings, parts and hooks that change after `fuse` count at the next call."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from fused_models import check_same, conv, disturb, fuse_all, observe, unit
from tolerances import FLOAT32_CHAIN, assert_close
from torch import nn
from torchvision.models.mobilenetv2 import InvertedResidual
from torchvision.models.resnet import BasicBlock

import nasfast

BatchNormAct2d = pytest.importorskip("timm").layers.BatchNormAct2d


def momentum_none(m: nn.Sequential) -> None:
    m[1].momentum = None


def replaced(m: nn.Sequential) -> None:
    m[0], m[3] = copy.deepcopy(m[3]), nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)


def no_norm_between(m: nn.Sequential) -> None:
    m[1] = m[2] = nn.Identity()


def sequential() -> nn.Sequential:
    return nn.Sequential(*unit(nn.Tanh()), *unit())


def set_down(m: BasicBlock) -> None:
    m.downsample = unit().double()


def set_function(m: BasicBlock) -> None:
    del m.relu
    m.relu = F.leaky_relu


# what changes: of two units, of an inverted residual, and of a block of a ResNet
CHANGES = {
    "momentum": (sequential, lambda m: setattr(m[1], "momentum", 0.3)),
    "momentum None": (sequential, momentum_none),
    "eps": (sequential, lambda m: setattr(m[4], "eps", 0.1)),
    "no tracking": (sequential, lambda m: setattr(m[1], "track_running_stats", False)),
    "trainable": (sequential, lambda m: m[0].requires_grad_(True)),
    "stride": (sequential, lambda m: setattr(m[0], "stride", (2, 2))),
    "unequal stride": (sequential, lambda m: setattr(m[0], "stride", (2, 1))),
    "dilation later": (sequential, lambda m: setattr(m[3], "dilation", (2, 2))),
    "bias later": (sequential, lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(4, dtype=torch.float64)))),
    "the activation twice": (sequential, lambda m: m.insert(2, nn.Tanh())),
    "no norm between": (sequential, no_norm_between),
    "an unknown activation": (sequential, lambda m: m.__setitem__(2, nn.GELU())),
    "another norm": (sequential, lambda m: m.__setitem__(4, nn.GroupNorm(2, 4, dtype=torch.float64))),
    "replaced": (sequential, replaced),
    "inserted": (sequential, lambda m: m.insert(2, nn.Dropout(0.5))),
    "parametrized": (sequential, lambda m: nn.utils.parametrizations.weight_norm(m[0])),
    "parametrized BatchNorm": (
        sequential,
        lambda m: nn.utils.parametrize.register_parametrization(m[1], "weight", nn.Tanh()),
    ),
    "activation of a block": (lambda: InvertedResidual(4, 4, 1, 2), lambda m: m.conv[0].__setitem__(2, nn.Tanh())),
    "forward of a part": (
        lambda: InvertedResidual(4, 4, 1, 2),
        lambda m: setattr(m.conv[0], "forward", lambda x: torch.cat([x, x], 1)),
    ),
    "hook": (
        lambda: InvertedResidual(4, 4, 1, 2),
        lambda m: m.conv[0].register_forward_hook(lambda module, args, y: y * 2),
    ),
    "submodule": (lambda: BasicBlock(4, 4), set_down),
    "function": (lambda: BasicBlock(4, 4), set_function),
    "wrapped": (
        lambda: BasicBlock(4, 4),
        lambda m: setattr(m, "forward", functools.partial(lambda old, x: old(x), m.forward)),
    ),
}
STILL_FUSED = {"activation of a block", "submodule", "wrapped"}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_fusing_are_noticed(change, executed):
    build, apply = CHANGES[change]
    plain = disturb(build().double())
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    check_same(observe(fused, x), observe(plain, x))
    assert executed
    executed.clear()
    for model in (plain, fused):
        torch.manual_seed(0)
        apply(model)
    for training in (True, False):
        want = observe(plain.train(training), x)
        check_same(observe(fused.train(training), x), want)
    assert executed or change not in STILL_FUSED


def test_another_type_is_noticed(executed):
    """`Module.to` writes to the same parameters."""
    fused = disturb(sequential().double()).eval()
    fuse_all(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    want = fused(x)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        y = fused.to(dtype)(x.to(dtype))
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), want, rtol=0.1, atol=0.1)
    assert len(executed) == 4


@pytest.mark.parametrize("clamp", [nn.Hardtanh, nn.ReLU6])
def test_bounds_of_activations(clamp, executed):
    """Since torch 2.15 the forward of nn.ReLU6 reads its bounds, too."""
    plain = disturb(unit(nn.Hardtanh(0, 6) if clamp is nn.Hardtanh else nn.ReLU6()).double()).eval()
    plain.requires_grad_(False)
    fused = copy.deepcopy(plain)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    fuse_all(fused)
    assert_close("before", fused(x), plain(x))
    assert len(executed) == 1
    plain[2].max_val = fused[2].max_val = 0.5
    assert_close("after", fused(x), plain(x))


# every kind on a module that owns a chain, and every place with a hook of each way
HOOKS = [(kind, "2") for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")]
HOOKS += [("forward", "0.0"), ("full_backward_pre", "0.0"), ("forward_pre", "0.1"), ("full_backward", "0.1")]
HOOKS += [("forward_pre", "0"), ("full_backward_pre", "0"), ("forward", "1.2"), ("full_backward", "1.2")]


@pytest.mark.parametrize(("kind", "path"), HOOKS)
def test_hooks_added_later_fire(path, kind, executed):
    plain = nn.Sequential(unit(), unit(nn.Identity()), nn.Sequential(unit(), unit())).double()
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    fused(x)
    with_hooks, chains = [], len(executed)
    assert executed == [(2, False), (2, False)]
    for model in (plain, fused):
        seen = []
        hook = lambda module, *tensors, seen=seen: seen.append(tensors)  # noqa: E731
        handle = getattr(model.get_submodule(path), f"register_{kind}_hook")(hook)
        executed.clear()
        observe(model, x)
        handle.remove()
        assert len(seen) == 1
        with_hooks.append([t for tensors in seen[0] for t in (tensors if isinstance(tensors, tuple) else (tensors,))])
    # the model then runs as before, and the module inside of it that owns a chain is captured by itself
    assert len(executed) == chains - 1
    for got, want in zip(with_hooks[1], with_hooks[0], strict=True):
        assert type(got) is type(want)
        assert (got is None) == (want is None)
        if got is not None:
            assert_close("hook", got, want, floor=1.0)
    executed.clear()
    fused(x)
    assert len(executed) == chains


@pytest.mark.parametrize(("training", "only_faster"), [(True, False), (False, True)])
def test_only_the_bias_of_a_convolution_trains(training, only_faster, executed):
    plain = disturb(nn.Sequential(*unit(nn.Tanh()), *unit(nn.Tanh(), bias=True))).requires_grad_(False).train(training)
    plain[3].bias.requires_grad_()
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    nasfast.fuse(fused, only_faster=only_faster)
    x = torch.randn(2, 4, 9, 9)
    results = []
    for model, given in ((fused, x), (exact, x.double())):
        y = model(given)
        y.square().mean().backward()
        results.append({"result": y, "gradient": model[3].bias.grad, **dict(model.named_buffers())})
    for name, want in results[1].items():
        assert_close(name, results[0][name], want, FLOAT32_CHAIN, floor=1.0)
    assert executed == ([] if only_faster else [(2, False)])


class OwnForward(nn.Sequential):
    """It changes an attribute that it reads, so that it is captured a few times and then runs as before."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("cls", [nn.Sequential, OwnForward])
def test_hooks_inside_of_a_batch_norm_fire(cls, executed):
    body = cls(conv(4, 4, 3), BatchNormAct2d(4), conv(4, 4, 3), BatchNormAct2d(4))
    plain = disturb(nn.Sequential(body, *unit())).double().eval().requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    assert_close("before", fused(x), plain(x))
    assert executed
    seen = []
    hook = fused.get_submodule("0.1.act").register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    want = plain(x)
    assert_close("with a hook", fused(x), want)
    hook.remove()
    assert [(type(given), type(y)) for given, y in seen] == [(torch.Tensor, torch.Tensor)]
    assert_close("after", fused(x), want)


def test_global_hooks_see_every_module(executed):
    model = nn.Sequential(unit(), unit())
    fuse_all(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    model(torch.randn(2, 4, 9, 9))
    handle.remove()
    assert seen.count(nn.BatchNorm2d) == 2
    assert executed == []
