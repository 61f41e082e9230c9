"""Which modules `fuse` takes as a chain, and why it leaves the others."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fused_models import Body, added_in_place, check_same, conv, disturb, fuse_all, half, observe, second, unit, whole
from torch import Tensor, nn

from nasfast.ops.modules import ConvBNAct

timm = pytest.importorskip("timm")


class OtherConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


class KeywordConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(input=x, weight=self.weight)


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


def as_weight(m: Body, x: Tensor) -> Tensor:
    filters = half(m, x[:, :, :3, :3])
    return m.extra(F.conv2d(torch.cat([x, x], dim=1), filters, padding=1))


def as_input_and_weight(m: Body, x: Tensor) -> Tensor:
    y = half(m, x[:, :, :3, :3])
    return m.extra(F.conv2d(y, y, padding=1))


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


def changed_before_norm(m: Body, x: Tensor) -> Tensor:
    x = 1 * x
    y = m.conv1(x)
    x.mul_(3)
    return second(m, m.act(m.bn1(y))) + x


def point(norm: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(conv(4, 4, 1), norm or nn.BatchNorm2d(4))


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

# name: what makes the module, its chains, and why convolutions are outside of them if there are any
STRUCTURES = {
    "sequential": (lambda: nn.Sequential(unit(), unit()), [PAIR]),
    "relu6 as hardtanh": (lambda: unit(nn.Hardtanh(0, 6)), ["3x3 4->4 relu6"]),
    "another hardtanh": (lambda: unit(nn.Hardtanh(0, 5)), ["3x3 4->4"]),
    "own activation": (lambda: unit(OwnActivation()), ["3x3 4->4 relu6"]),
    "identities": (lambda: nn.Sequential(unit(nn.Identity()), nn.Identity(), *unit()), ["3x3 4->4, 3x3 4->4 relu"]),
    "stride, groups": (
        lambda: nn.Sequential(*unit(stride=2, groups=4), *unit(groups=2)),
        ["dw3x3 s2 4 relu, 3x3 g2 4->4 relu"],
    ),
    "gelu": (lambda: nn.Sequential(unit(nn.GELU()), unit()), ["3x3 4->4", "3x3 4->4 relu"]),
    "two activations": (lambda: nn.Sequential(*unit(), nn.ReLU6(), *unit()), ["3x3 4->4 relu", "3x3 4->4 relu"]),
    "blocks": (lambda: nn.Sequential(nn.Sequential(unit(), unit()), nn.Sequential(unit(), unit())), [PAIR, PAIR]),
    "bias": (lambda: nn.Sequential(*unit(), *unit(bias=True)), [PAIR]),
    "dilation": (lambda: unit(dilation=2), [], ["has dilation=(2, 2)"]),
    "padding (0, 1)": (lambda: unit(padding=(0, 1)), [], ["has padding=(0, 1)"]),
    "padding same": (lambda: unit(padding="same"), [], ["has padding='same'"]),
    "padding reflect": (lambda: unit(padding_mode="reflect"), ["3x3 4->4 relu"]),
    "no affine": (lambda: point(nn.BatchNorm2d(4, affine=False)), [], ["its BatchNorm has no affine parameters"]),
    "no statistics": (lambda: point(nn.BatchNorm2d(4, track_running_stats=False)), ["1x1 4->4"]),
    "cumulative average": (lambda: point(nn.BatchNorm2d(4, momentum=None)), ["1x1 4->4"]),
    "SyncBatchNorm": (
        lambda: point(nn.SyncBatchNorm(4)),
        [],
        ["followed by SyncBatchNorm, not by a BatchNorm"],
    ),
    "GroupNorm": (lambda: point(nn.GroupNorm(2, 4)), [], ["followed by GroupNorm, not by a BatchNorm"]),
    "nothing behind": (lambda: nn.Sequential(conv(4, 4, 1)), [], ["its result leaves the module, without a BatchNorm"]),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)),
        [],
        ["is a conv_transpose2d, not a conv2d"],
    ),
    "subclass that overrides": (
        lambda: nn.Sequential(OtherConv(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        ["1x1 4->4"],
    ),
    "input by its name": (
        lambda: nn.Sequential(KeywordConv(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        ["1x1 4->4"],
    ),
    "BatchNorm that overrides": (
        lambda: point(OtherBatchNorm(4)),
        ["1x1 4->4"],
    ),
    "result as a weight": (
        lambda: Body(as_weight, conv2=None, bn2=None, extra=nn.BatchNorm2d(2)),
        ["1x1 4->8"],
    ),
    "result as input and weight": (
        lambda: Body(as_input_and_weight, conv2=None, bn2=None, extra=nn.BatchNorm2d(2)),
        ["1x1 4->8"],
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(conv(4, 4, 1)), nn.BatchNorm2d(4)),
        [],
        ["its weight is computed by the forward"],
    ),
    "tied weights": (lambda: tied(conv(4, 4, 1), conv(4, 4, 1)), ["1x1 4->4, 1x1 4->4"]),
    "convolution called twice": (
        lambda: Body(lambda m, x: m.bn2(m.conv2(m.bn1(m.conv1(x)) + m.bn1(m.conv1(2 * x))))),
        ["1x1 4->8", "3x3 8->4"],
    ),
    "block called twice": (lambda: repeated(nn.Sequential(unit(), unit())), [PAIR]),
    "used twice": (
        lambda: Body(lambda m, x: (lambda y: m.bn2(m.conv2(m.bn1(y) * y)))(m.conv1(x))),
        ["3x3 8->4"],
        ["its result is used more than once"],
    ),
    "activation discarded": (lambda: Body(discarded), ["1x1 4->8", "3x3 8->4"]),
    "functional relu": (lambda: Body(lambda m, x: second(m, F.relu(half(m, x)))), ["1x1 4->8 relu, 3x3 8->4"]),
    "functional hardswish": (
        lambda: Body(lambda m, x: second(m, F.hardswish(half(m, x), True))),
        ["1x1 4->8 hswish, 3x3 8->4"],
    ),
    "method relu": (lambda: Body(lambda m, x: second(m, half(m, x).relu())), ["1x1 4->8 relu, 3x3 8->4"]),
    "clamp is none": (lambda: Body(lambda m, x: second(m, half(m, x).clamp(0, 6))), ["1x1 4->8", "3x3 8->4"]),
    "chain + x": (lambda: Body(lambda m, x: whole(m, x) + x), [WHOLE + ", + residual"]),
    "torch.add": (lambda: Body(lambda m, x: torch.add(x, whole(m, x))), [WHOLE + ", + residual"]),
    "scaled add": (lambda: Body(lambda m, x: torch.add(x, whole(m, x), alpha=2)), [WHOLE]),
    "method add_": (lambda: Body(lambda m, x: whole(m, x).add_(x)), [WHOLE + ", + residual"]),
    "chain += x": (lambda: Body(added_in_place), [WHOLE + ", + residual"]),
    "x.add_(chain)": (lambda: Body(lambda m, x: (2 * x).add_(whole(m, x))), [WHOLE]),
    "broadcast": (lambda: Body(lambda m, x: whole(m, x) + x.mean((2, 3), keepdim=True)), [WHOLE + ", + residual"]),
    "relu behind the add": (lambda: Body(lambda m, x: F.relu(whole(m, x) + x)), [WHOLE + ", + residual"]),
    "add behind relu": (
        lambda: Body(lambda m, x: x + m.act(whole(m, x))),
        ["1x1 4->8 relu6, 3x3 8->4 relu6, + residual"],
    ),
    "two chains meet": (
        lambda: Body(lambda m, x: whole(m, x) + m.extra(x), extra=point()),
        [WHOLE + ", + residual", "1x1 4->4"],
    ),
    "body in a Sequential": (
        lambda: Body(
            lambda m, x: x + m.block(x), conv1=None, bn1=None, conv2=None, bn2=None, block=nn.Sequential(unit(), unit())
        ),
        [PAIR + ", + residual"],
    ),
    "forward replaced": (
        lambda: nn.Sequential(with_forward(conv(4, 4, 1)), nn.BatchNorm2d(4), *unit()),
        ["3x3 4->4 relu"],
        ["inside a module whose forward was replaced on the instance"],
    ),
    "untraceable child": (
        lambda: Body(lambda m, x: m.extra(whole(m, x)), extra=Untraceable()),
        ["3x3 4->4 relu"],
        ["is called by a forward whose trace does not reach all of its convolutions"] * 2,
    ),
    "ours": (
        lambda: nn.Sequential(ConvBNAct(4, 4, 3, fused=True), unit()),
        ["3x3 4->4 relu"],
        ["inside a ConvBNAct that is fused already"],
    ),
    "timm's BatchNorm with ReLU": (
        lambda: nn.Sequential(*point(timm.layers.BatchNormAct2d(4)), *unit()),
        ["1x1 4->4 relu, 3x3 4->4 relu"],
    ),
    "timm's BatchNorm with dropout": (
        lambda: point(timm.layers.BatchNormAct2d(4, drop_layer=nn.Dropout)),
        ["1x1 4->4"],
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name, executed):
    build, chains, reasons = (*STRUCTURES[name], [])[:3]
    plain = disturb(build().double())
    fused = copy.deepcopy(plain)
    report = fuse_all(fused)
    assert [str(chain) for chain in report.chains] == chains
    assert [left.reason for left in report.left if "Conv" in left.kind] == reasons
    for training in (True, False):
        x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
        want = observe(plain.train(training), x, steps=2)
        assert executed == []
        check_same(observe(fused.train(training), x, steps=2), want)
        # before torch 2.15, TorchDynamo captures no momentum that depends on the number of batches
        if not (training and name == "cumulative average"):
            assert bool(executed) == bool(chains)
        executed.clear()


@pytest.mark.parametrize(
    ("forward", "chains"),
    [
        # in a trace this looks like x + chain; the forward distinguishes the two
        (added_to_input, [WHOLE + ", + residual"]),
        (in_place_on_input, ["1x1 4->8 relu6", "3x3 8->4, + residual"]),
        (changed_before_norm, ["3x3 8->4, + residual"]),
    ],
    ids=["x += chain", "x changed between stages", "x changed inside a stage"],
)
def test_changes_of_the_input(forward, chains, executed):
    plain = Body(forward)
    fused = copy.deepcopy(plain)
    assert [str(chain) for chain in fuse_all(fused).chains] == chains
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
    assert [(chain.owner, chain.convolutions) for chain in fuse_all(model).chains] == [("1", ("1.0",))]
    torch.testing.assert_close(model(x), want)
    assert executed == [(1, False)]
