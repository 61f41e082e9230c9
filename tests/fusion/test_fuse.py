"""fuse and unfuse against the same model unfused: results, gradients, statistics, and all else a user could notice."""

import copy
import pickle
import random
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from tolerances import BFLOAT16_CHAIN, assert_close
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import nasfast
from nasfast.fusion import run as deferred
from nasfast.ops.modules import BNAct2d, FusedConvBNAct

timm = pytest.importorskip("timm")

# model: convolutions in chains, of all, chains
MODELS = {
    "mobilenet_v2": (52, 52, 19),
    "shufflenet_v2_x0_5": (56, 56, 21),
    "mnasnet0_5": (52, 52, 18),
    "resnet18": (20, 20, 12),
    "resnet50": (53, 53, 21),
    "mobilenet_v3_small": (34, 52, 30),
    "timm/mobilenetv2_100": (52, 52, 19),
    "timm/efficientnet_lite0": (49, 49, 18),
}
# one for each kind of block: inverted residuals, shuffle units, dense convolutions, squeeze and excitation
FAST = {"mobilenet_v2", "shufflenet_v2_x0_5", "resnet18", "mobilenet_v3_small"}
MODES = ["frozen convolutions", "eval", "frozen all but BatchNorm", "all trainable", "mixed"]


@pytest.fixture(autouse=True)
def one_thread():
    """Layers are so small here that threads waiting for each other take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def executed(monkeypatch):
    """The stages of every chain that really ran."""
    calls = []
    run = deferred.conv_bn_act_chain

    def record(x, stages, *, residual=None):
        calls.append((len(stages), residual is not None))
        return run(x, stages, residual=residual)

    monkeypatch.setattr(deferred, "conv_bn_act_chain", record)
    return calls


def make(name: str) -> nn.Module:
    if name.startswith("timm/"):
        return timm.create_model(name[len("timm/") :], pretrained=False, num_classes=10)
    return getattr(torchvision.models, name)(weights=None, num_classes=10)


def set_mode(model: nn.Module, mode: str) -> nn.Module:
    model.train(mode != "eval")
    generator = random.Random(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.requires_grad_(mode == "all trainable")
        elif mode == "frozen all but BatchNorm" and not isinstance(module, nn.BatchNorm2d):
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        elif mode == "mixed" and isinstance(module, nn.BatchNorm2d):
            # statistics frozen here, affine parameters there
            module.train(generator.random() < 0.7)
            module.weight.requires_grad_(generator.random() < 0.5)
            module.bias.requires_grad_(generator.random() < 0.5)
    return model


def disturb(model: nn.Module) -> nn.Module:
    """BatchNorms that have seen data: nothing is zero or one."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.weight, module.bias, module.running_mean):
                if tensor is not None:
                    nn.init.uniform_(tensor, -0.5, 1.5)
            if module.running_var is not None:
                nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def observe(model: nn.Module, x: Tensor, steps: int = 1) -> dict[str, Tensor]:
    """Result, gradient of the input and of every parameter, and all buffers after some forwards."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    random.seed(0)
    x = x.detach().clone().requires_grad_()
    for _ in range(steps):
        y = model(x)
        (y * torch.arange(y.numel(), dtype=y.dtype).sin().reshape(y.shape)).sum().backward()
    seen = {"result": y, "gradient of x": x.grad, **dict(model.named_buffers())}
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().clone() for name, tensor in seen.items()}


def check_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        # what is zero but for rounding has terms of order one
        assert_close(name, got[name].double(), want[name].double(), floor=1.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_models_give_the_same(name, mode, executed):
    plain = set_mode(disturb(make(name).double()), mode)
    fused = copy.deepcopy(plain)
    report = nasfast.fuse(fused)
    assert (report.fused, report.convolutions, len(report.chains)) == MODELS[name]
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    want = observe(plain, x)
    assert executed == []
    check_same(observe(fused, x), want)
    assert sum(stages for stages, _ in executed) == report.fused
    assert sum(residual for _, residual in executed) == sum(chain.residual for chain in report.chains)


@pytest.mark.parametrize("mode", ["frozen convolutions", "eval"])
@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "timm/efficientnet_lite0"])
def test_float32_is_as_accurate(name, mode, backend, monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", backend)
    plain = set_mode(disturb(make(name)), mode)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    nasfast.fuse(fused)
    x = torch.randn(4, 3, 64, 64)
    want = observe(exact, x.double())

    def error(got: dict[str, Tensor]) -> float:
        assert got.keys() == want.keys()
        errors = [float((got[n].double() - want[n]).norm() / want[n].double().norm().clamp_min(1e-3)) for n in want]
        return float(np.median(errors))

    # kinks and sums in another order make single tensors differ, in the same way for both
    assert error(observe(fused, x)) <= 3 * error(observe(plain, x))


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18", "timm/mobilenetv2_100"])
def test_nothing_else_changes_and_unfuse_restores(name):
    model = make(name)
    handle = model.register_forward_hook(lambda *_: None)

    def state() -> list:
        return [
            (path, type(m), m.training, [(key, id(value)) for key, value in vars(m).items() if key != "forward"])
            for path, m in model.named_modules()
        ]

    before, keys = state(), list(model.state_dict())
    tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    variables = [set(vars(m)) for m in model.modules()]
    report = nasfast.fuse(model)
    assert state() == before
    assert list(model.state_dict()) == keys
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in model.state_dict().items())
    assert nasfast.fuse(model) == report
    assert state() == before
    changed = [m for m, names in zip(model.modules(), variables, strict=True) if set(vars(m)) != names]
    assert len(changed) == len({chain.owner for chain in report.chains})
    assert nasfast.unfuse(model) == len(report.chains)
    assert [set(vars(m)) for m in model.modules()] == variables
    assert state() == before
    assert nasfast.unfuse(model) == 0
    assert handle.id in model._forward_hooks


def test_copies_and_pickles_use_their_own_parameters(executed):
    fused = disturb(make("resnet18")).eval()
    nasfast.fuse(fused)
    x = torch.randn(2, 3, 32, 32)
    want = fused(x)
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        executed.clear()
        torch.testing.assert_close(twin(x), want)
        assert len(executed) == 12
        with torch.no_grad():
            twin.layer1[0].conv1.weight.zero_()
        assert not torch.allclose(twin(x), want)
        torch.testing.assert_close(fused(x), want)
        assert nasfast.unfuse(twin) == 12
    executed.clear()
    fused(x)
    assert len(executed) == 12


# ------------------------------------------------------------------------------------------------ what is a chain


def conv(*sizes: int, **settings) -> nn.Conv2d:
    return nn.Conv2d(*sizes, **{"bias": False, **settings})


def unit(act: nn.Module | None = None, **settings) -> nn.Sequential:
    return nn.Sequential(conv(4, 4, 3, **{"padding": 1, **settings}), nn.BatchNorm2d(4), act or nn.ReLU())


class Body(nn.Module):
    """Two units whose forward is given."""

    def __init__(self, forward, **members: nn.Module) -> None:
        super().__init__()
        self.run = forward
        self.conv1, self.bn1 = conv(4, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = conv(8, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act = nn.ReLU6(inplace=True)
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class OtherConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class SameConv(nn.Conv2d):
    """A subclass that runs as its parent does."""


class OtherBatchNorm(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = unit()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(2 * x)


class OwnActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x)


def body(forward, **members) -> Body:
    return Body(forward, **members)


def second(m: Body, y: Tensor) -> Tensor:
    return m.bn2(m.conv2(y))


def half(m: Body, x: Tensor) -> Tensor:
    return m.bn1(m.conv1(x))


def whole(m: Body, x: Tensor) -> Tensor:
    return second(m, m.act(half(m, x)))


def discarded(m: Body, x: Tensor) -> Tensor:
    y = half(m, x)
    m.act(y)
    return second(m, y)


def in_place_on_input(m: Body, x: Tensor) -> Tensor:
    x = 1 * x
    y = m.act(half(m, x))
    x.mul_(3)
    return second(m, y) + x


def added_to_input(m: Body, x: Tensor) -> Tensor:
    x = 1 * x
    seen = x
    x += whole(m, x)
    return x + 2 * seen


def added_in_place(m: Body, x: Tensor) -> Tensor:
    y = whole(m, x)
    y += x
    return y


def changed_before_norm(m: Body, x: Tensor) -> Tensor:
    x = 1 * x
    y = m.conv1(x)
    x.mul_(3)
    return second(m, m.act(m.bn1(y))) + x


def with_forward(module: nn.Module) -> nn.Module:
    module.forward = partial(type(module).forward, module)
    return module


def tied(first: nn.Conv2d, other: nn.Conv2d) -> nn.Sequential:
    other.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm2d(4), other, nn.BatchNorm2d(4))


def repeated(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(module, nn.ReLU(), module)


WHOLE = "1x1 4->8 relu6, 3x3 8->4"
PAIR = "3x3 4->4 relu, 3x3 4->4 relu"
# name: what makes the module, its chains, and why the convolutions outside of them are there
STRUCTURES = {
    "sequential": (lambda: nn.Sequential(unit(), unit()), [PAIR], []),
    "flat": (lambda: nn.Sequential(*unit(), *unit(nn.Tanh())), ["3x3 4->4 relu, 3x3 4->4 tanh"], []),
    "one unit": (unit, ["3x3 4->4 relu"], []),
    "relu6 as hardtanh": (lambda: unit(nn.Hardtanh(0, 6)), ["3x3 4->4 relu6"], []),
    "another hardtanh": (lambda: unit(nn.Hardtanh(0, 5)), ["3x3 4->4, then Hardtanh"], []),
    "own activation": (lambda: unit(OwnActivation()), ["3x3 4->4 relu6"], []),
    "identities": (lambda: nn.Sequential(unit(nn.Identity()), nn.Identity(), *unit()), ["3x3 4->4, 3x3 4->4 relu"], []),
    "stride, groups": (
        lambda: nn.Sequential(*unit(stride=2, groups=4), *unit(groups=2)),
        ["dw3x3 s2 4 relu, 3x3 g2 4->4 relu"],
        [],
    ),
    "kernel 3x1": (lambda: nn.Sequential(conv(4, 4, (3, 1), padding=1), nn.BatchNorm2d(4)), ["3x1 4->4"], []),
    "hardswish": (
        lambda: nn.Sequential(unit(nn.Hardswish(inplace=True)), unit()),
        ["3x3 4->4, then Hardswish", "3x3 4->4 relu"],
        [],
    ),
    "silu": (lambda: unit(nn.SiLU()), ["3x3 4->4, then SiLU"], []),
    "two activations": (lambda: nn.Sequential(*unit(), nn.ReLU6(), *unit()), ["3x3 4->4 relu", "3x3 4->4 relu"], []),
    "dropout between": (
        lambda: nn.Sequential(*unit(), nn.Dropout(0.5), *unit()),
        ["3x3 4->4 relu", "3x3 4->4 relu"],
        [],
    ),
    "pooling between": (
        lambda: nn.Sequential(*unit(), nn.MaxPool2d(2), *unit()),
        ["3x3 4->4 relu", "3x3 4->4 relu"],
        [],
    ),
    "blocks": (lambda: nn.Sequential(nn.Sequential(unit(), unit()), nn.Sequential(unit(), unit())), [PAIR, PAIR], []),
    "bias": (lambda: nn.Sequential(*unit(), *unit(bias=True)), ["3x3 4->4 relu"], ["has a bias"]),
    "dilation": (lambda: unit(dilation=2), [], ["has dilation=(2, 2)"]),
    "stride (1, 2)": (lambda: unit(stride=(1, 2)), [], ["has stride=(1, 2)"]),
    "padding (0, 1)": (lambda: unit(padding=(0, 1)), [], ["has padding=(0, 1)"]),
    "padding same": (lambda: unit(padding="same"), [], ["has padding='same'"]),
    "padding reflect": (lambda: unit(padding_mode="reflect"), [], ["has padding_mode='reflect'"]),
    "no affine": (
        lambda: nn.Sequential(conv(4, 4, 1), nn.BatchNorm2d(4, affine=False)),
        [],
        ["its BatchNorm has no affine parameters"],
    ),
    "no statistics": (
        lambda: nn.Sequential(conv(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)),
        ["1x1 4->4"],
        [],
    ),
    "cumulative average": (lambda: nn.Sequential(conv(4, 4, 1), nn.BatchNorm2d(4, momentum=None)), ["1x1 4->4"], []),
    "SyncBatchNorm": (
        lambda: nn.Sequential(conv(4, 4, 1), nn.SyncBatchNorm(4)),
        [],
        ["its BatchNorm is a SyncBatchNorm, whose forward is not nn.BatchNorm2d's"],
    ),
    "GroupNorm": (
        lambda: nn.Sequential(conv(4, 4, 1), nn.GroupNorm(2, 4)),
        [],
        ["followed by GroupNorm, not by BatchNorm2d"],
    ),
    "nothing behind": (lambda: conv(4, 4, 1), [], ["no traced forward reaches it"]),
    "returned": (lambda: nn.Sequential(conv(4, 4, 1)), [], ["followed by output, not by BatchNorm2d"]),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)),
        [],
        ["is a ConvTranspose2d, whose forward is not nn.Conv2d's"],
    ),
    "subclass that overrides": (
        lambda: nn.Sequential(OtherConv(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        [],
        ["is a OtherConv, whose forward is not nn.Conv2d's"],
    ),
    "subclass that does not": (
        lambda: nn.Sequential(SameConv(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        ["1x1 4->4"],
        [],
    ),
    "BatchNorm that overrides": (
        lambda: nn.Sequential(conv(4, 4, 1), OtherBatchNorm(4)),
        [],
        ["its BatchNorm is a OtherBatchNorm, whose forward is not nn.BatchNorm2d's"],
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(conv(4, 4, 1)), nn.BatchNorm2d(4)),
        [],
        ["its weight is parametrized"],
    ),
    "old spectral norm": (
        lambda: nn.Sequential(nn.utils.spectral_norm(conv(4, 4, 1)), nn.BatchNorm2d(4)),
        [],
        ["its weight is no parameter"],
    ),
    "tied weights": (lambda: tied(conv(4, 4, 1), conv(4, 4, 1)), [], ["shares its weight with another module"] * 2),
    "convolution called twice": (
        lambda: body(lambda m, x: m.bn2(m.conv2(m.bn1(m.conv1(x)) + m.bn1(m.conv1(2 * x))))),
        ["3x3 8->4"],
        ["is called several times in one forward"],
    ),
    "block called twice": (lambda: repeated(nn.Sequential(unit(), unit())), [PAIR], []),
    "used twice": (
        lambda: body(lambda m, x: (lambda y: m.bn2(m.conv2(m.bn1(y) * y)))(m.conv1(x))),
        ["3x3 8->4"],
        ["its result is used more than once"],
    ),
    "used twice behind BatchNorm": (
        lambda: body(lambda m, x: (lambda y: second(m, m.act(y)) + y[:, :4])(half(m, x))),
        ["1x1 4->8", "3x3 8->4, + residual"],
        [],
    ),
    "activation discarded": (lambda: body(discarded), ["1x1 4->8", "3x3 8->4"], []),
    "functional relu6": (lambda: body(lambda m, x: second(m, F.relu6(half(m, x), inplace=True))), [WHOLE], []),
    "functional hardtanh": (lambda: body(lambda m, x: second(m, F.hardtanh(half(m, x), 0.0, 6.0))), [WHOLE], []),
    "functional relu": (lambda: body(lambda m, x: second(m, F.relu(half(m, x)))), ["1x1 4->8 relu, 3x3 8->4"], []),
    "torch.relu": (lambda: body(lambda m, x: second(m, torch.relu(half(m, x)))), ["1x1 4->8 relu, 3x3 8->4"], []),
    "torch.tanh": (lambda: body(lambda m, x: second(m, torch.tanh(half(m, x)))), ["1x1 4->8 tanh, 3x3 8->4"], []),
    "method relu": (lambda: body(lambda m, x: second(m, half(m, x).relu())), ["1x1 4->8 relu, 3x3 8->4"], []),
    "method relu_": (lambda: body(lambda m, x: second(m, half(m, x).relu_())), ["1x1 4->8 relu, 3x3 8->4"], []),
    "clamp is none": (lambda: body(lambda m, x: second(m, half(m, x).clamp(0, 6))), ["1x1 4->8", "3x3 8->4"], []),
    "x + chain": (lambda: body(lambda m, x: x + whole(m, x)), [WHOLE + ", + residual"], []),
    "chain + x": (lambda: body(lambda m, x: whole(m, x) + x), [WHOLE + ", + residual"], []),
    "torch.add": (lambda: body(lambda m, x: torch.add(x, whole(m, x))), [WHOLE + ", + residual"], []),
    "scaled add": (lambda: body(lambda m, x: torch.add(x, whole(m, x), alpha=2)), [WHOLE], []),
    "method add": (lambda: body(lambda m, x: whole(m, x).add(x)), [WHOLE + ", + residual"], []),
    "method add_": (lambda: body(lambda m, x: whole(m, x).add_(x)), [WHOLE + ", + residual"], []),
    "chain += x": (lambda: body(added_in_place), [WHOLE + ", + residual"], []),
    "x.add_(chain)": (lambda: body(lambda m, x: (2 * x).add_(whole(m, x))), [WHOLE], []),
    "chain + number": (lambda: body(lambda m, x: whole(m, x) + 1), [WHOLE], []),
    "chain + itself": (lambda: body(lambda m, x: (lambda y: y + y)(whole(m, x))), [WHOLE], []),
    "broadcast": (lambda: body(lambda m, x: whole(m, x) + x.mean((2, 3), keepdim=True)), [WHOLE + ", + residual"], []),
    "relu behind the add": (lambda: body(lambda m, x: F.relu(whole(m, x) + x)), [WHOLE + ", + residual"], []),
    "add behind relu": (
        lambda: body(lambda m, x: x + m.act(whole(m, x))),
        ["1x1 4->8 relu6, 3x3 8->4 relu6, + residual"],
        [],
    ),
    "two chains meet": (
        lambda: body(lambda m, x: whole(m, x) + m.extra(x), extra=nn.Sequential(conv(4, 4, 1), nn.BatchNorm2d(4))),
        [WHOLE + ", + residual", "1x1 4->4"],
        [],
    ),
    "body in a Sequential": (
        lambda: body(
            lambda m, x: x + m.block(x), conv1=None, bn1=None, conv2=None, bn2=None, block=nn.Sequential(unit(), unit())
        ),
        [PAIR + ", + residual"],
        [],
    ),
    "forward replaced": (
        lambda: nn.Sequential(with_forward(conv(4, 4, 1)), nn.BatchNorm2d(4), *unit()),
        ["3x3 4->4 relu"],
        ["is a Conv2d, whose forward is not nn.Conv2d's"],
    ),
    "untraceable child": (
        lambda: body(lambda m, x: m.extra(whole(m, x)), extra=Untraceable()),
        [WHOLE, "3x3 4->4 relu"],
        [],
    ),
    "ours": (
        lambda: nn.Sequential(FusedConvBNAct(4, 4, 3), unit()),
        ["3x3 4->4 relu"],
        ["fused already (FusedConvBNAct)"],
    ),
    "ours behind a convolution": (
        lambda: nn.Sequential(conv(4, 4, 1), BNAct2d(4)),
        [],
        ["its BatchNorm fused already (BNAct2d)"],
    ),
    "timm's BatchNorm with ReLU": (
        lambda: nn.Sequential(conv(4, 4, 1), timm.layers.BatchNormAct2d(4), *unit()),
        ["1x1 4->4 relu, 3x3 4->4 relu"],
        [],
    ),
    "timm's BatchNorm with SiLU": (
        lambda: nn.Sequential(conv(4, 4, 1), timm.layers.BatchNormAct2d(4, act_layer=nn.SiLU), *unit()),
        ["1x1 4->4, then SiLU", "3x3 4->4 relu"],
        [],
    ),
    "timm's BatchNorm with dropout": (
        lambda: nn.Sequential(conv(4, 4, 1), timm.layers.BatchNormAct2d(4, drop_layer=nn.Dropout)),
        [],
        ["its BatchNorm is a BatchNormAct2d, whose forward is not nn.BatchNorm2d's"],
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name, executed):
    build, chains, reasons = STRUCTURES[name]
    plain = disturb(build().double())
    fused = copy.deepcopy(plain)
    report = nasfast.fuse(fused)
    assert [str(chain) for chain in report.chains] == chains
    assert [left.reason for left in report.left if "Conv" in left.kind] == reasons
    for training in (True, False):
        x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
        want = observe(plain.train(training), x, steps=2)
        assert executed == []
        check_same(observe(fused.train(training), x, steps=2), want)
        assert bool(executed) == bool(chains)
        executed.clear()


@pytest.mark.parametrize(
    ("forward", "chains"),
    [
        # a trace cannot tell this from x + chain; the forward can
        (added_to_input, [WHOLE + ", + residual"]),
        (in_place_on_input, ["1x1 4->8 relu6", "3x3 8->4, + residual"]),
        (changed_before_norm, ["3x3 8->4, + residual"]),
    ],
    ids=["x += chain", "x changed between stages", "x changed inside a stage"],
)
def test_changes_of_the_input(forward, chains, executed):
    plain = body(forward)
    fused = copy.deepcopy(plain)
    assert [str(chain) for chain in nasfast.fuse(fused).chains] == chains
    x = torch.randn(2, 4, 9, 9)
    # convolutions keep their input for backward, so that PyTorch itself refuses this with gradients
    with torch.no_grad():
        torch.testing.assert_close(fused(x), plain(x))
    assert executed


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_scripted_modules_are_left(executed):
    x = torch.randn(2, 4, 9, 9)
    model = nn.Sequential(torch.jit.trace(unit().eval(), x), unit()).eval()
    want = model(x)
    assert [(chain.owner, chain.convolutions) for chain in nasfast.fuse(model).chains] == [("1", ("1.0",))]
    torch.testing.assert_close(model(x), want)
    assert executed == [(1, False)]


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions(dims):
    classes = {1: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv3d, nn.BatchNorm3d)}[dims]
    model = nn.Sequential(classes[0](2, 2, 1, bias=False), classes[1](2))
    report = nasfast.fuse(model)
    assert [(left.kind, left.reason) for left in report.left] == [
        (f"Conv{dims}d", f"is a Conv{dims}d, whose forward is not nn.Conv2d's"),
        (f"BatchNorm{dims}d", f"is a BatchNorm{dims}d, whose forward is not nn.BatchNorm2d's"),
    ]
    assert nasfast.unfuse(model) == 0


# ------------------------------------------------------------------------------------ settings are read at each call


def momentum_none(m: nn.Sequential) -> None:
    m[1].momentum = None


def replaced(m: nn.Sequential) -> None:
    m[0], m[3] = copy.deepcopy(m[3]), nn.Conv2d(4, 4, 3, padding=1, dtype=torch.float64)


def no_norm_between(m: nn.Sequential) -> None:
    m[1] = m[2] = nn.Identity()


CHANGES = {
    "eval of one BatchNorm": lambda m: m[1].eval(),
    "momentum": lambda m: setattr(m[1], "momentum", 0.3),
    "momentum None": momentum_none,
    "eps": lambda m: setattr(m[4], "eps", 0.1),
    "no tracking": lambda m: setattr(m[1], "track_running_stats", False),
    "statistics removed": lambda m: [setattr(m[1], name, None) for name in ("running_mean", "running_var")],
    "trainable": lambda m: m[0].requires_grad_(True),
    "frozen affine": lambda m: m[4].requires_grad_(False),
    "no affine": lambda m: [setattr(m[1], name, None) for name in ("weight", "bias")],
    "stride": lambda m: setattr(m[0], "stride", (2, 2)),
    "unequal stride": lambda m: setattr(m[0], "stride", (2, 1)),
    "unequal stride later": lambda m: setattr(m[3], "stride", (2, 1)),
    "dilation later": lambda m: setattr(m[3], "dilation", (2, 2)),
    "bias later": lambda m: setattr(m[3], "bias", nn.Parameter(torch.ones(4, dtype=torch.float64))),
    "another activation": lambda m: m.__setitem__(2, nn.ReLU()),
    "the activation twice": lambda m: m.insert(2, nn.Tanh()),
    "no norm between": no_norm_between,
    "an unknown activation": lambda m: m.__setitem__(2, nn.SiLU()),
    "no activation": lambda m: m.__setitem__(2, nn.Identity()),
    "another norm": lambda m: m.__setitem__(4, nn.GroupNorm(2, 4, dtype=torch.float64)),
    "replaced": replaced,
    "removed": lambda m: m.__delitem__(0),
    "inserted": lambda m: m.insert(2, nn.Dropout(0.5)),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m[0]),
    "parametrized later": lambda m: nn.utils.parametrizations.weight_norm(m[3]),
    "parametrized BatchNorm": lambda m: nn.utils.parametrize.register_parametrization(m[1], "weight", nn.Tanh()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_changed_after_fusing(change, executed):
    plain = disturb(nn.Sequential(*unit(nn.Tanh()), *unit()).double())
    fused = copy.deepcopy(plain)
    assert nasfast.fuse(fused).fused == 2
    torch.manual_seed(0)
    CHANGES[change](plain)
    torch.manual_seed(0)
    CHANGES[change](fused)
    for step in range(2):
        x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
        want = observe(plain, x)
        check_same(observe(fused, x), want)
        if step == 0:
            plain.eval(), fused.eval()


@pytest.mark.parametrize("path", ["0", "1", "2", "0.0", "0.1", "0.2", "1.0", "1.2"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_added_later_fire(path, kind, executed):
    plain = nn.Sequential(unit(), unit(nn.Identity()), nn.Sequential(unit(), unit())).double()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
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
    # a hook on a module that owns a chain, or behind it, sees nothing of its inside
    assert len(executed) == (chains if path in ("2", "1.2") else chains - 1)
    for got, want in zip(with_hooks[1], with_hooks[0], strict=True):
        assert type(got) is type(want)
        assert (got is None) == (want is None)
        if got is not None:
            assert_close("hook", got, want, floor=1.0)
    executed.clear()
    fused(x)
    assert len(executed) == chains


def test_global_hooks_see_every_module(executed):
    model = nn.Sequential(unit(), unit())
    nasfast.fuse(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    model(torch.randn(2, 4, 9, 9))
    handle.remove()
    assert seen.count(nn.BatchNorm2d) == 2
    assert executed == []


def test_the_report_tells_of_what_trains_and_of_hooks():
    model = nn.Sequential(*unit(), *unit())
    model[0].requires_grad_(False)
    model[4].eval()
    handle = model[2].register_forward_hook(lambda *_: None)
    notes = nasfast.fuse(model).notes
    assert notes == (
        "1 convolution in chains trainable: runs, but keeps its input: freeze it with requires_grad_(False): 3",
        "1 BatchNorm in chains in eval mode: normalises with its running statistics: 4",
        "1 module in chains with hooks: its chain runs unfused while they are there: 2",
    )
    handle.remove()
    assert nasfast.fuse(model.requires_grad_(False).train()).notes == ()


# --------------------------------------------------------------------------------------------------- control flow


class Candidate(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.expand, self.bn1 = conv(4, 8, 1), nn.BatchNorm2d(8)
        self.dw, self.bn2 = conv(8, 8, kernel, padding=kernel // 2, groups=8), nn.BatchNorm2d(8)
        self.project, self.bn3 = conv(8, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.expand(x)))
        return x + self.bn3(self.project(F.relu6(self.bn2(self.dw(y)))))


class Choice(nn.Module):
    """A layer of a supernet; `how` says who chooses the candidate."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.ops = nn.ModuleList([Candidate(3), Candidate(5), nn.Identity()])
        self.how, self.active, self.forwards = how, 0, 0

    def forward(self, x: Tensor, choice: int = 1) -> Tensor:
        self.forwards += 1
        if self.how == "attribute":
            choice = self.active
        elif self.how == "random":
            choice = random.randrange(3)
        elif self.how == "numpy":
            choice = int(np.random.randint(3))
        elif self.how == "torch":
            choice = int(torch.randint(3, ()))
        elif self.how == "data":
            choice = int(x.sum() > 0)
        return self.ops[choice](x)


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.stem = unit()
        self.layers = nn.ModuleList([Choice(how), Choice(how)])

    def forward(self, x: Tensor, path: tuple[int, ...] = (0, 1)) -> Tensor:
        x = self.stem(x)
        for layer, choice in zip(self.layers, path, strict=True):
            x = layer(x, choice)
        return x


@pytest.mark.parametrize("how", ["argument", "attribute", "random", "numpy", "torch", "data"])
def test_supernets_keep_choosing(how, executed):
    plain = disturb(Net(how).double())
    fused = copy.deepcopy(plain)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    report = nasfast.fuse(fused)
    after = random.random(), float(np.random.rand()), float(torch.rand(()))
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    assert after == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert [layer.forwards for layer in fused.layers] == [0, 0]
    check_same(dict(fused.named_buffers()), dict(plain.named_buffers()))
    assert (report.fused, len(report.chains)) == (13, 5)
    assert all(chain.residual for chain in report.chains if chain.owner != "stem")
    for step in range(12):
        for model in (plain, fused):
            model.layers[0].active, model.layers[1].active = step % 3, step // 3 % 3
        np.random.seed(step)
        want = observe(plain, x := torch.randn(2, 4, 9, 9, dtype=torch.float64), steps=2)
        np.random.seed(step)
        check_same(observe(fused, x, steps=2), want)
    assert [layer.forwards for layer in fused.layers] == [24, 24]
    assert {(1, False), (3, True)} == set(executed)


class Fickle(nn.Module):
    """A block whose forward is not what it was when it was fused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = conv(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.way = "chain"

    def forward(self, x: Tensor) -> Tensor:
        way = self.way
        if way == "stop early":
            return F.relu(self.bn1(self.conv1(x)))
        if way == "convolution only":
            return self.conv1(x)
        if way == "no gradient first":
            with torch.no_grad():
                y = self.bn1(self.conv1(x))
            return self.bn2(self.conv2(F.relu(y))) + x
        if way == "no gradient last":
            y = F.relu(self.bn1(self.conv1(x)))
            with torch.no_grad():
                y = self.bn2(self.conv2(y))
            return y + x
        y = self.bn1(self.conv1(x))
        if way == "read between":
            y = y * y.abs().mean()
        if way == "read twice":
            return self.bn2(self.conv2(F.relu(y))) + y + F.relu(y)
        if way == "read before":
            return y.mean() + self.bn2(self.conv2(F.relu(y)))
        if way == "other activation":
            return self.bn2(self.conv2(torch.tanh(y))) + x
        if way == "activation twice":
            return self.bn2(self.conv2(F.relu(F.relu(y)))) + x
        if way == "no activation":
            return self.bn2(self.conv2(y)) + x
        if way == "normalised twice":
            return self.bn2(self.conv2(F.relu(self.bn2(y)))) + x
        if way == "more convolutions":
            return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(F.relu(y)))))) + x
        if way == "dropped":
            self.bn2(self.conv2(F.relu(y)))
            return 2 * x
        z = self.bn2(self.conv2(F.relu(y)))
        if way == "no residual":
            return z
        if way == "in containers":
            return {"a": [z, (x, z)]}["a"][1][1]
        if way == "concatenated":
            return torch.cat([x, z], 1)
        if way == "kept":
            self.kept = z
            return self.kept * 2
        if way == "subtracted":
            return x - z
        if way == "scaled":
            return torch.add(x, z, alpha=3)
        if way == "added to itself":
            return z + z
        if way == "to the input":
            x = 1 * x
            x += z
            return x
        return z + x


WAYS = [
    "stop early",
    "convolution only",
    "no gradient first",
    "no gradient last",
    "read between",
    "read twice",
    "read before",
    "other activation",
    "activation twice",
    "no activation",
    "normalised twice",
    "more convolutions",
    "dropped",
    "no residual",
    "in containers",
    "concatenated",
    "kept",
    "subtracted",
    "scaled",
    "added to itself",
    "to the input",
    "chain",
]


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_changes_its_way_stays_right(way, executed):
    plain = disturb(Fickle().double())
    fused = copy.deepcopy(plain)
    assert [str(chain) for chain in nasfast.fuse(fused).chains] == ["3x3 4->4 relu, 3x3 4->4, + residual"]
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    plain.way = fused.way = way
    check_same(observe(fused, x, steps=2), observe(plain, x, steps=2))
    # what has been computed is not computed again
    if way == "read before":
        assert executed == [(1, False)] * 2


@pytest.mark.parametrize("pack", [lambda z: z, lambda z: [z], lambda z: {"z": (z, 1)}], ids=["bare", "list", "dict"])
def test_results_are_tensors(pack):
    class Packing(Fickle):
        def forward(self, x: Tensor) -> object:
            return pack(super().forward(x))

    model = Packing()
    assert nasfast.fuse(model).chains[0].residual
    model.way = "no residual"
    (result,) = (t for t in tree_leaves(model(torch.randn(2, 4, 9, 9))) if isinstance(t, Tensor))
    assert type(result) is Tensor
    assert result.shape == (2, 4, 9, 9)


def test_a_failed_trace_leaves_the_model_untouched():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.seen = conv(4, 4, 1), nn.BatchNorm2d(4), []

        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("traced", stacklevel=1)
            self.seen.append(1)
            y = self.bn(self.conv(x))
            if x.sum() > 0:
                raise ValueError
            return y

    model = nn.Sequential(Odd(), unit())
    before = [dict(vars(m)) for m in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = nasfast.fuse(model)
    assert [str(chain) for chain in report.chains] == ["3x3 4->4 relu"]
    assert report.left[0].reason == (
        "the forward of 0 cannot be traced (symbolically traced variables cannot be used as inputs to control flow)"
    )
    assert model[0].seen == []
    nasfast.unfuse(model)
    assert [dict(vars(m)) for m in model.modules()] == before


def test_a_model_that_cannot_be_copied_is_left():
    model = nn.Sequential(unit())
    model.lock = threading.Lock()
    report = nasfast.fuse(model)
    assert report.chains == ()
    assert "cannot be copied, so that nothing was traced (cannot pickle" in report.left[0].reason


def test_hooks_do_not_run_while_tracing():
    model = nn.Sequential(unit(), unit())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    assert nasfast.fuse(model).fused == 2
    assert seen == []
    assert len(model[0]._forward_hooks) == 1


# -------------------------------------------------------------------------------------------- around the forward


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that a forward keeps for backward, parameters and the input left out."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    assert y.requires_grad
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_saves_no_more_for_backward(name):
    plain = set_mode(make(name), "frozen convolutions")
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(4, 3, 64, 64)
    # besides values, two float64 numbers per channel instead of two float32 ones
    statistics = sum(8 * m.num_features for m in plain.modules() if isinstance(m, nn.BatchNorm2d))
    assert saved_bytes(fused, x) <= saved_bytes(plain, x) + statistics


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant, executed):
    plain = disturb(nn.Sequential(Candidate(3), Candidate(5)).double())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    results = []
    for model in (plain, fused):

        class Checkpointed(nn.Module):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: Tensor) -> Tensor:
                for block in self.net:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                return x

        results.append(observe(Checkpointed(model), x))
    check_same(results[1], results[0])
    assert executed == [(3, True)] * 4


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet18"])
def test_autocast(name, executed):
    plain = set_mode(disturb(make(name)), "frozen convolutions").eval()
    fused = copy.deepcopy(plain)
    report = nasfast.fuse(fused)
    x = torch.randn(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = plain(x), fused(x)
    assert got.dtype == want.dtype == torch.bfloat16
    assert sum(stages for stages, _ in executed) == report.fused
    assert_close("autocast", got, want.double(), BFLOAT16_CHAIN)


def test_autocast_inside_a_forward():
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = conv(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = conv(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = F.relu(self.bn1(self.conv1(x)))
            return self.bn2(self.conv2(y.float())) + self.bn2(x)

    plain = Inside()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 4, 9, 9)
    assert_close("autocast inside", fused(x), plain(x).double(), BFLOAT16_CHAIN)


def test_residual_types():
    """In place the result keeps the type of the chain; otherwise types promote."""
    for forward, dtype in ((added_in_place, torch.bfloat16), (lambda m, x: whole(m, x) + x, torch.float32)):
        model = Body(forward)
        nasfast.fuse(model)
        x = torch.randn(2, 4, 9, 9)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype == dtype


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_without_gradients(scope, executed):
    plain = disturb(nn.Sequential(Candidate(3), unit()).double())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    with scope():
        want, got = plain(x), fused(x)
    assert not got.requires_grad
    assert got.is_inference() == want.is_inference()
    assert_close("result", got, want)
    check_same(dict(fused.named_buffers()), dict(plain.named_buffers()))
    assert executed == [(3, True), (1, False)]


def test_half_precision_modules_run_as_before(executed):
    plain = nn.Sequential(unit(), unit()).bfloat16()
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 4, 9, 9, dtype=torch.bfloat16)
    torch.testing.assert_close(fused(x), plain(x))
    torch.testing.assert_close(fused.state_dict(), plain.state_dict())
    assert executed == []


@pytest.mark.parametrize(
    "x",
    [torch.randn(1, 4, 1, 1), torch.randn(2, 3, 9, 9), torch.randn(4, 9, 9), torch.randn(2, 4, 9, 9).long()],
    ids=["one value per channel", "wrong channels", "no batch", "integers"],
)
def test_errors_are_those_of_the_model(x):
    plain = nn.Sequential(unit(), unit())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    with pytest.raises((ValueError, RuntimeError)) as want:
        plain(x)
    with pytest.raises(want.type) as got:
        fused(x)
    assert str(got.value) == str(want.value)


def test_input_changed_in_place_meanwhile_is_refused():
    class Changing(Fickle):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv1(x)
            if self.way == "change":
                x.zero_()
            return self.bn1(y)

    model = Changing()
    nasfast.fuse(model)
    model.way = "change"
    with pytest.raises(RuntimeError, match="starts at conv1 was changed in place before the chain ran; call nasfast"):
        model(torch.randn(2, 4, 9, 9))


def test_slices_and_parts_run_alone(executed):
    plain = set_mode(disturb(make("mobilenet_v2").double()), "frozen convolutions")
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    for part in (lambda m: m.features[:5], lambda m: m.features[0][0], lambda m: m.features[:2][0]):
        check_same(observe(part(fused), x), observe(part(plain), x))
    assert executed


def test_parts_fused_again_by_themselves(executed):
    plain = disturb(nn.Sequential(unit(), unit(), unit()).double())
    fused = copy.deepcopy(plain)
    nasfast.fuse(fused)
    assert nasfast.fuse(fused[0]).fused == 1
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    want = observe(plain, x)
    check_same(observe(fused, x), want)
    assert executed == [(1, False)]
    assert nasfast.unfuse(fused) == 2


def test_compilers_and_tracers_see_the_plain_model(executed):
    model = nn.Sequential(unit(), unit()).eval()
    nasfast.fuse(model)
    x = torch.randn(2, 4, 9, 9)
    want = model(x)
    executed.clear()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), want)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.trace(model, x, check_trace=False)(x), want)
    assert executed == []
    reasons = {left.reason for left in nasfast.fuse(torch.compile(nn.Sequential(unit()))).left}
    assert reasons == {"inside a module compiled by torch.compile, which fuses by itself"}


def test_functional_parameters(executed):
    model = nn.Sequential(unit(), unit()).double().eval()
    nasfast.fuse(model)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    got = torch.func.functional_call(model, other, (x,))
    assert len(executed) == 1
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(other)
    assert len(executed) == 1
    nasfast.unfuse(model)
    assert_close("result", got, torch.func.functional_call(model, other, (x,)))
    want = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(other)
    check_same(gradients, want)


def test_two_threads(executed):
    model = nn.Sequential(Candidate(3), Candidate(5)).double().eval()
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    want = model(x)
    nasfast.fuse(model)
    results = []
    threads = [threading.Thread(target=lambda: results.extend(model(x) for _ in range(20))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    for result in results:
        assert_close("result", result, want)


@pytest.mark.parametrize("function", [nasfast.fuse, nasfast.unfuse])
def test_only_modules(function):
    with pytest.raises(TypeError, match=rf"^{function.__name__}: model must be a torch.nn.Module, got dict$"):
        function({"model": nn.ReLU()})


def test_report_as_text(monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", "reference")
    model = nn.Sequential(unit(nn.Hardswish()), unit(bias=True), unit(dilation=2), Candidate(5)).requires_grad_(False)
    model[3].expand.requires_grad_()
    assert str(nasfast.fuse(model)) == (
        "4 of 6 convolutions in 2 chains; backend: reference (float32 on cpu)\n"
        "  0  3x3 4->4, then Hardswish\n"
        "  3  1x1 4->8 relu6, dw5x5 8 relu6, 1x1 8->4, + residual\n"
        "not fused:\n"
        "  Conv2d: has a bias: 1.0\n"
        "  Conv2d: has dilation=(2, 2): 2.0\n"
        "  BatchNorm2d: not behind a fused convolution: 1.1, 2.1\n"
        "note: 1 convolution in chains trainable: runs, but keeps its input: freeze it with requires_grad_(False): "
        "3.expand"
    )
    monkeypatch.setenv("NASFAST_BACKEND", "cuda")
    assert "backend: none (conv_bn_act_chain: backend 'cuda'" in str(nasfast.fuse(model))
    assert str(nasfast.fuse(nn.Linear(2, 2))).startswith("0 of 0 convolutions in 0 chains; backend: none")
