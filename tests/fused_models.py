"""Models for the tests of `fuse`, and what is compared of a model before and after."""

import random

import pytest
import torch
import torch.nn.functional as F
import torchvision
from tolerances import assert_close
from torch import Tensor, nn
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.mnasnet import MNASNet
from torchvision.models.mobilenetv2 import MobileNetV2
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.shufflenetv2 import ShuffleNetV2

import nasfast
from nasfast.fusion import FuseReport

timm = pytest.importorskip("timm")

# models of well-known blocks: convolutions in chains, of all, chains
MODELS = {
    "mobilenet_v2": (52, 52, 19),
    "timm/mobilenetv2_100": (52, 52, 19),
    "timm/mobilenetv3_small_100": (34, 53, 22),
    "small ghostnet": (24, 27, 22),
    "small lite efficientnet": (8, 8, 4),
    "small mnasnet": (9, 9, 3),
    "small mobilenet_v2": (10, 10, 5),
    "small mobilenet_v3": (10, 14, 7),
    "small efficientnet": (13, 21, 10),
    "small regnet": (12, 18, 9),
    "small resnet": (12, 12, 8),
    "small resnet of bottlenecks": (20, 20, 10),
    "small rexnet": (23, 27, 16),
    "small shufflenet_v2": (20, 20, 9),
}


def small() -> nn.Module:
    """MobileNetV2 with three blocks."""
    return MobileNetV2(num_classes=10, inverted_residual_setting=[[1, 8, 1, 1], [6, 16, 2, 2]])


def small_efficientnet() -> nn.Module:
    blocks = [(1, 3, 1, 16, 16, 1), (4, 3, 2, 16, 24, 2), (4, 5, 2, 24, 40, 1)]
    return EfficientNet([MBConvConfig(*block) for block in blocks], dropout=0.0, num_classes=10, last_channel=64)


def small_mobilenet_v3() -> nn.Module:
    blocks = [(16, 3, 16, 16, True, "RE", 2), (16, 3, 64, 24, False, "RE", 2), (24, 5, 96, 24, True, "HS", 1)]
    return MobileNetV3([InvertedResidualConfig(*block, 1, 1.0) for block in blocks], last_channel=64, num_classes=10)


def small_regnet() -> nn.Module:
    widths = BlockParams([1, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return RegNet(widths, num_classes=10)


def small_ghostnet() -> nn.Module:
    """A block without stride, one with stride and one with squeeze-and-excitation, and the residual of each kind."""
    blocks = [[[3, 16, 16, 0, 1]], [[3, 48, 24, 0, 2]], [[3, 72, 24, 0, 1]], [[5, 72, 40, 0.25, 2]]]
    return timm.models.ghostnet.GhostNet(blocks, num_classes=10)


def small_lite_efficientnet() -> nn.Module:
    """An inverted residual with stride, and one with an addition."""
    blocks = timm.models._efficientnet_builder.decode_arch_def([["ir_r2_k5_s2_e6_c24"]])
    return timm.models.efficientnet.EfficientNet(
        blocks, num_classes=10, num_features=64, stem_size=16, fix_stem=True, act_layer=nn.ReLU6
    )


def small_mnasnet() -> nn.Module:
    """The stem, an inverted residual with stride, and one with an addition."""
    model = MNASNet(0.5, num_classes=10)
    del model.layers[9:], model.layers[8][2:]
    model.classifier = nn.Linear(16, 10)
    return model


# the blocks of large ones, each once or twice: TorchDynamo takes seconds for a large network
SMALL = {
    "small mobilenet_v2": small,
    "small mobilenet_v3": small_mobilenet_v3,
    "small efficientnet": small_efficientnet,
    "small ghostnet": small_ghostnet,
    "small lite efficientnet": small_lite_efficientnet,
    "small mnasnet": small_mnasnet,
    "small regnet": small_regnet,
    "small resnet": lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10),
    "small resnet of bottlenecks": lambda: ResNet(Bottleneck, [2, 1, 1, 1], num_classes=10),
    "small rexnet": lambda: timm.models.rexnet.RexNet(depth_mult=0.2, num_classes=10),
    "small shufflenet_v2": lambda: ShuffleNetV2([2, 1, 1], [24, 32, 64, 128, 64], num_classes=10),
}


def make(name: str) -> nn.Module:
    if name in SMALL:
        return SMALL[name]()
    if name.startswith("timm/"):
        return timm.create_model(name[len("timm/") :], pretrained=False, num_classes=10)
    return getattr(torchvision.models, name)(weights=None, num_classes=10)


def fuse_all(model: nn.Module) -> FuseReport:
    """Fuse a model so that every chain runs on the operator, whatever is faster."""
    return nasfast.fuse(model, only_faster=False)


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
            # one layer has frozen statistics, another one frozen affine parameters
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


def check_close(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def median_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Of float64 values that are wanted; kinks and sums in another order make single tensors differ."""
    assert got.keys() == want.keys()
    errors = [(got[n].double() - want[n].double()).norm() / want[n].double().norm().clamp_min(1e-3) for n in want]
    return float(torch.stack(errors).quantile(0.5))


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


def second(m: Body, y: Tensor) -> Tensor:
    return m.bn2(m.conv2(y))


def half(m: Body, x: Tensor) -> Tensor:
    return m.bn1(m.conv1(x))


def whole(m: Body, x: Tensor) -> Tensor:
    return second(m, m.act(half(m, x)))


def added_in_place(m: Body, x: Tensor) -> Tensor:
    y = whole(m, x)
    y += x
    return y


class Candidate(nn.Module):
    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.expand, self.bn1 = conv(4, 8, 1), nn.BatchNorm2d(8)
        self.dw, self.bn2 = conv(8, 8, kernel, padding=kernel // 2, groups=8), nn.BatchNorm2d(8)
        self.project, self.bn3 = conv(8, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.expand(x)))
        return x + self.bn3(self.project(F.relu6(self.bn2(self.dw(y)))))


class Asserting(nn.Module):
    """Not in a file of tests, where pytest rewrites each assert."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Candidate(3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 4 and x.ndim == 4, "four channels"
        y = self.body(x)
        assert y.isfinite().all(), "not finite"
        return y


class Checking(Candidate):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 4 and x.ndim == 4, "four channels"
        return super().forward(x)


class Fickle(nn.Module):
    """A block whose forward changes after it was fused."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = conv(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.way = "chain"

    def forward(self, x: Tensor) -> Tensor:
        way = self.way
        if way == "stop early":
            return F.relu(self.bn1(self.conv1(x)))
        if way == "no gradient first":
            with torch.no_grad():
                y = self.bn1(self.conv1(x))
            return self.bn2(self.conv2(F.relu(y))) + x
        y = self.bn1(self.conv1(x))
        if way == "read twice":
            return self.bn2(self.conv2(F.relu(y))) + y + F.relu(y)
        if way == "read before":
            return y.mean() + self.bn2(self.conv2(F.relu(y)))
        if way == "other activation":
            return self.bn2(self.conv2(torch.tanh(y))) + x
        if way == "activation twice":
            return self.bn2(self.conv2(F.relu(F.relu(y)))) + x
        if way == "normalised twice":
            return self.bn2(self.conv2(F.relu(self.bn2(y)))) + x
        if way == "more convolutions":
            return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(F.relu(y)))))) + x
        z = self.bn2(self.conv2(F.relu(y)))
        ways = {
            "dropped": lambda: 2 * x,
            "no residual": lambda: z,
            "concatenated": lambda: torch.cat([x, z], 1),
            "scaled": lambda: torch.add(x, z, alpha=3),
            "to the input": lambda: (1 * x).__iadd__(z),
            "chain": lambda: z + x,
        }
        return ways[way]()


class Switch(nn.Module):
    """Its forward reads an attribute, a submodule that may be None, and a function."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(unit(), unit(nn.Identity()))
        self.down = None
        self.skip = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.down is not None:
            x = self.down(x)
        if self.skip:
            y += x
        return torch.relu(y)
