"""Convolutions behind a padding of their own, as TensorFlow's: they are in chains like those that pad themselves."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from fused_models import check_same, conv, disturb, fuse_all, observe
from tolerances import FLOAT32_CHAIN, assert_close
from torch import Tensor, nn

timm = pytest.importorskip("timm")


class Padded(nn.Sequential):
    """Pads with a function of the size."""

    def __init__(self, widths, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.widths = widths

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.widths(x)))


def tensorflows(kernel: int):
    def widths(x: Tensor) -> list[int]:
        height, width = x.shape[-2:]
        pads = [max((math.ceil(size / 2) - 1) * 2 + kernel - size, 0) for size in (width, height)]
        return [part for pad in pads for part in (pad // 2, pad - pad // 2)]

    return widths


def inverted_residual(widths, kernel: int, **settings) -> nn.Module:
    depthwise = conv(8, 8, kernel, **{"stride": 2, "groups": 8, **settings})
    padded = [Padded(widths, depthwise)] if not isinstance(widths, nn.Module) else [widths, depthwise]
    first, last = (conv(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU6()), (conv(8, 4, 1), nn.BatchNorm2d(4))
    return nn.Sequential(*first, *padded, nn.BatchNorm2d(8), nn.SiLU(), *last)


# what pads, the kernel behind it, and the stages of the calls of the operator for images of an even and an odd size
PADDINGS = {
    "TensorFlow's, 3": (tensorflows(3), 3, {}, [3], [3]),
    "TensorFlow's, 5": (tensorflows(5), 5, {}, [3], [3]),
    "TensorFlow's, 7": (tensorflows(7), 7, {}, [1, 2], [3]),
    "TensorFlow's, dense": (tensorflows(3), 3, {"groups": 1}, [1, 2], [3]),
    "fixed": (nn.ZeroPad2d((0, 1, 0, 1)), 3, {}, [3], [1, 2]),
    "symmetric": (nn.ZeroPad2d(1), 3, {}, [3], [3]),
    "wide": (nn.ZeroPad2d((3, 1, 0, 2)), 3, {"stride": 1}, [1, 2], [1, 2]),
    "cut": (nn.ZeroPad2d((-1, 1, 1, 1)), 3, {}, [1, 2], [1, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PADDINGS)
def test_paddings(name, executed):
    widths, kernel, settings, even, odd = PADDINGS[name]
    plain = disturb(inverted_residual(widths, kernel, **settings)).double()
    for part in plain.modules():
        if isinstance(part, nn.Conv2d):
            part.requires_grad_(False)
    fused = copy.deepcopy(plain)
    report = fuse_all(fused)
    assert report.fused == 3
    for training in (True, False):
        # those of two sizes, of which the second is even in one direction alone
        for size, expected in (((10, 12), even), ((9, 11), odd), ((9, 12), None)):
            x = torch.randn(2, 4, *size, dtype=torch.float64)
            check_same(observe(fused.train(training), x), observe(plain.train(training), x))
            if expected is not None:
                assert [count for count, _ in executed] == expected
            executed.clear()
    assert report.fused == 3
    # one graph for all sizes, and one for each mode
    assert len(fused.forward.region.graphs) == 2


def test_a_convolution_that_trains_pads_by_pytorch(executed):
    plain = disturb(inverted_residual(tensorflows(3), 3)).double()
    fused, x = copy.deepcopy(plain), torch.randn(2, 4, 8, 8, dtype=torch.float64)
    fuse_all(fused)
    check_same(observe(fused, x), observe(plain, x))
    assert [count for count, _ in executed] == [1, 2]


def test_the_native_kernels_pad(native, executed):
    plain = disturb(inverted_residual(tensorflows(3), 3)).eval().requires_grad_(False)
    fused, x = copy.deepcopy(plain), torch.randn(2, 4, 8, 9)
    fuse_all(fused)
    with torch.no_grad():
        assert_close("result", fused(x), plain.double()(x.double()), FLOAT32_CHAIN)
    assert executed == [(3, False)]


def test_deterministic_algorithms(executed, poisoned_memory):
    """With them, F.pad asks where its input is."""
    model = disturb(inverted_residual(nn.ZeroPad2d(1), 3)).eval().requires_grad_(False)
    fused, x = copy.deepcopy(model), torch.randn(2, 4, 8, 8)
    fuse_all(fused)
    with torch.no_grad():
        assert_close("result", fused(x), model(x), FLOAT32_CHAIN)
    assert [count for count, _ in executed] == [3]


OTHERS = {
    "a number": lambda x: F.pad(x, (0, 1, 0, 1), value=1.0),
    "reflected": lambda x: F.pad(x, (0, 1, 0, 1), mode="reflect"),
    "channels": lambda x: F.pad(x, (0, 0, 0, 0, 0, 4))[:, :8],
    "rows alone": lambda x: F.pad(x, (1, 1)),
    "less than nothing": lambda x: F.pad(x, (-1, -1, -1, -1)),
}


class Between(nn.Module):
    def __init__(self, pad) -> None:
        super().__init__()
        self.pad, self.conv1, self.bn1 = pad, conv(4, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = conv(8, 4, 3, stride=2), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.pad(F.relu(self.bn1(self.conv1(x))))))


def size_beside(x: Tensor) -> Tensor:
    """Its channels are asked for, too, which the input of the chain does not have."""
    return F.pad(x, (0, x.shape[1] // 8, 0, 1))


@pytest.mark.parametrize("name", [*OTHERS, "channels are asked for"])
def test_other_paddings_end_a_chain(name, executed):
    plain = disturb(Between(OTHERS.get(name, size_beside))).double()
    model = copy.deepcopy(plain)
    fuse_all(model)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    check_same(observe(model, x), observe(plain, x))
    assert [count for count, _ in executed] in ([1, 1], [2])


class ChangesLater(Between):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        z = self.bn1(self.conv1(F.pad(y, (1, 1, 1, 1))))
        y.add_(0.5)
        return z.sum() + y


def test_an_input_that_changes_later():
    """PyTorch keeps the padded copy for backward."""
    plain = disturb(ChangesLater(None)).double()
    plain.conv1.requires_grad_(False)
    plain.conv2 = nn.Identity()
    model, x = copy.deepcopy(plain), torch.randn(2, 4, 8, 8, dtype=torch.float64)
    assert fuse_all(model).fused
    check_same(observe(model, x), observe(plain, x))


@pytest.mark.slow
def test_tensorflows_networks_of_timm(executed):
    """Sizes that are computed from sizes behind several paddings: a graph has images of one size, and any batch."""
    reports = []
    for pad_type in ("", "same"):
        blocks = ["ir_r1_k3_s2_e2_c8", "ir_r2_k5_s2_e2_c8_se0.25", "ir_r1_k3_s2_e2_c8"]
        plain = timm.models.efficientnet.EfficientNet(
            timm.models._efficientnet_builder.decode_arch_def([[block] for block in blocks]),
            num_classes=10,
            num_features=16,
            stem_size=8,
            fix_stem=True,
            act_layer=nn.ReLU6,
            pad_type=pad_type,
        )
        plain = disturb(plain).double().eval().requires_grad_(False)
        fused = copy.deepcopy(plain)
        reports.append(fuse_all(fused))
        expected = reports[-1].fused
        for batch, size in ((1, 40), (2, 33), (3, 40)):
            x = torch.randn(batch, 3, size, size, dtype=torch.float64)
            assert_close("result", fused(x), plain(x))
        assert reports[-1].fused == expected == reports[-1].convolutions - 4  # those of squeeze-and-excitation
    assert str(reports[0]) == str(reports[1])
    assert len(fused.forward.region.graphs) == 2 and not fused.forward.region.own
