"""A network with every kind of block that is searched, whose BatchNorms have statistics as after training."""

import torch
from torch import nn


def conv(inputs, outputs, kernel=1, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)
    )


class Excite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, 4, 1), nn.Conv2d(4, width, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Expansion, depthwise convolution, squeeze-and-excitation, projection."""

    def __init__(self, inputs, outputs, hidden, stride=1, excite=False):
        super().__init__()
        self.expand, self.depthwise = conv(inputs, hidden), conv(hidden, hidden, 3, stride, hidden)
        self.excite = Excite(hidden) if excite else nn.Identity()
        self.project = conv(hidden, outputs)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x):
        y = nn.functional.relu6(self.expand(x))
        y = self.project(self.excite(nn.functional.relu6(self.depthwise(y))))
        return x + y if self.shortcut else y


class Basic(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.first, self.second = conv(width, hidden, 3), conv(hidden, width, 3)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        y += x
        return nn.functional.relu(y, inplace=True)


class Bottleneck(nn.Module):
    def __init__(self, inputs, outputs, hidden, groups):
        super().__init__()
        self.reduce, self.middle = conv(inputs, hidden), conv(hidden, hidden, 3, 2, groups)
        self.expand, self.downsample = conv(hidden, outputs), conv(inputs, outputs, 1, 2)

    def forward(self, x):
        y = self.expand(torch.relu(self.middle(torch.relu(self.reduce(x)))))
        return torch.relu(y + self.downsample(x))


class Small(nn.Module):
    """Images (N, 3, 16, 16) to logits (N, classes)."""

    def __init__(self, classes=5):
        super().__init__()
        self.stem = conv(3, 8, 3)
        self.inverted = Inverted(8, 8, 24, excite=True)
        self.down = Inverted(8, 12, 20, stride=2)
        self.basic, self.second_basic = Basic(12, 16), Basic(12, 16)
        self.grouped, self.plain = Bottleneck(12, 16, 16, 4), Bottleneck(16, 16, 16, 1)
        self.head, self.classifier = conv(16, 24), nn.Linear(24, classes)

    def forward(self, x):
        x = self.down(self.inverted(nn.functional.relu6(self.stem(x))))
        x = self.plain(self.grouped(self.second_basic(self.basic(x))))
        x = nn.functional.adaptive_avg_pool2d(torch.relu(self.head(x)), 1)
        return self.classifier(torch.flatten(nn.functional.dropout(x, 0.2, self.training), 1))


class Excited(nn.Module):
    """Squeeze-and-excitation as many write it: linear layers, sizes as numbers, and an expansion."""

    def __init__(self, expand):
        super().__init__()
        self.expand, self.project, self.to = conv(8, 16), conv(16, 8), expand
        self.squeeze, self.excite = nn.Linear(16, 4), nn.Linear(4, 16)

    def forward(self, x):
        y = torch.relu(self.expand(x))
        count, width, _, _ = y.shape
        factor = nn.functional.adaptive_avg_pool2d(y, 1).view(count, width)
        factor = self.excite(torch.relu(self.squeeze(factor))).sigmoid().view(count, width, 1, 1)
        return x + self.project(y * self.to(factor, y))


def excited(expand=torch.Tensor.expand_as):
    return nn.Sequential(conv(3, 8), Excited(expand), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def small(classes=5, seed=0):
    """The network with random weights and statistics, in evaluation mode and float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = Small(classes).double()
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.5)
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
    return net.eval()


def images(count=48, size=16, seed=1):
    """Smooth images, so that channels are correlated as those of photos are."""
    coarse = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")
