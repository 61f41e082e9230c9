"""What a chain or a squeeze-and-excitation reads and writes, and what else uses the same memory meanwhile."""

import copy

import pytest
import torch
from fused_models import Body, check_same, conv, disturb, fuse_all, half, second
from torch import Tensor, nn
from torchvision.ops.misc import SqueezeExcitation

from nasfast.fusion import dynamo


def scaled(y: Tensor, statistics: Tensor) -> Tensor:
    return y * (1 + statistics.mean().to(y.dtype))


def read_between_stages(m: Body, x: Tensor) -> Tensor:
    y = m.act(half(m, x))
    mean = m.bn1.running_mean.clone()
    return scaled(second(m, y), mean)


def read_before_the_activation(m: Body, x: Tensor) -> Tensor:
    y = half(m, x)
    var = m.bn1.running_var * 1.0
    return scaled(second(m, m.act(y)), var)


def read_before_the_norm(m: Body, x: Tensor) -> Tensor:
    y = m.conv1(x)
    mean = m.bn1.running_mean + 0
    return scaled(second(m, m.act(m.bn1(y))), mean)


def read_through_a_view(m: Body, x: Tensor) -> Tensor:
    view = m.bn1.running_mean.detach()[1:].view(-1)
    y = m.act(half(m, x))
    mean = view + 0
    return scaled(second(m, y), mean)


def read_the_second(m: Body, x: Tensor) -> Tensor:
    y = second(m, m.act(half(m, x)))
    mean = m.bn2.running_mean + 0
    return scaled(y, mean) + m.bn1.running_mean.mean()


def counted(m: Body, x: Tensor) -> Tensor:
    y = m.act(half(m, x))
    batches = m.bn1.num_batches_tracked.clone()
    return second(m, y) * batches


def reset(m: Body, x: Tensor) -> Tensor:
    y = m.act(half(m, x))
    m.bn1.running_mean.zero_()
    return second(m, y)


def written_through_a_view(m: Body, x: Tensor) -> Tensor:
    x = 1 * x
    view = x[:, :2]
    y = m.act(half(m, x))
    view += 1
    return second(m, y) + x


def item_set(m: Body, x: Tensor) -> Tensor:
    x = 1 * x
    y = m.conv1(x)
    x[:, 0] = 0
    return second(m, m.act(m.bn1(y))) + x


def other_memory_changes(m: Body, x: Tensor) -> Tensor:
    y = m.conv1(x)
    other = torch.relu_(2 * x)
    other += 1
    return second(m, m.act(m.bn1(y))) + other


def shared_norm(m: Body, x: Tensor) -> Tensor:
    return m.bn1(m.conv2(m.act(m.bn1(m.conv1(x)))))


# forward, and the stages of the chains in training
ORDERS = {
    "read between stages": (read_between_stages, [1, 1]),
    "read before the activation": (read_before_the_activation, [1, 1]),
    "read before the BatchNorm": (read_before_the_norm, [2]),
    "read through a view": (read_through_a_view, [1, 1]),
    "read behind the chain": (read_the_second, [2]),
    "batches are counted": (counted, [2]),
    "statistics are written": (reset, [1, 1]),
    "input changes through a view": (written_through_a_view, [1, 1]),
    "input changes by an index": (item_set, [1]),
    "other memory changes": (other_memory_changes, [2]),
    "shared BatchNorm": (shared_norm, [1, 1]),
}

# those in evaluation are whole, unless something is written
EXPECTED_IN_EVALUATION = {name: ORDERS[name][1] for name in ORDERS if name.startswith(("input", "statistics"))}


@pytest.fixture(autouse=True)
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def lengths(executed):
    """The stages of the chains that ran since the last call."""

    def take() -> list[int]:
        taken = [stages for stages, _ in executed]
        executed.clear()
        return taken

    return take


# a trace of `fuse` does not go through an assignment to items
WAYS = [
    (name, way)
    for name in ORDERS
    for way in ("fuse", "compile")
    if (name, way) != ("input changes by an index", "fuse")
]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_the_order_of_reads_and_writes(name, way, lengths):
    forward, expected = ORDERS[name]
    members = {"conv2": nn.Conv2d(8, 8, 1), "bn2": None} if forward is shared_norm else {}
    plain = disturb(Body(forward, **members)).double().to(memory_format=torch.channels_last)
    plain.requires_grad_(False)
    model = copy.deepcopy(plain)
    if way == "fuse":
        fuse_all(model)
    else:
        model.compile(backend=dynamo.compile_graph, options={"inner": "eager", "only_faster": False}, fullgraph=True)
    for training in (True, False):
        x = torch.randn(2, 4, 6, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
        want = [plain.train(training)(x.clone()) for _ in range(2)]
        got = [model.train(training)(x.clone()) for _ in range(2)]
        check_same(
            dict(enumerate(got)) | dict(model.named_buffers()), dict(enumerate(want)) | dict(plain.named_buffers())
        )
        # without batch statistics a BatchNorm only reads
        assert lengths() == (2 * expected if training else 2 * EXPECTED_IN_EVALUATION.get(name, [2]))


def test_inputs_that_share_memory_in_a_later_call(lengths):
    """No guard of TorchDynamo sees that."""

    class Two(Body):
        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            y = self.conv1(x)
            other.add_(1)
            return second(self, self.act(self.bn1(y))) + other

    plain = Two(None).requires_grad_(False)
    fused = copy.deepcopy(plain)
    fuse_all(fused)
    for share in (False, True):
        memory = torch.randn(3, 4, 6, 6)
        want = plain((one := memory.clone())[:2], one[1:] if share else memory[1:].clone())
        got = fused((two := memory.clone())[:2], two[1:] if share else memory[1:].clone())
        torch.testing.assert_close(got, want)
    assert lengths() == [1, 1]


class Excited(SqueezeExcitation):
    """Something happens between its mean and its product."""

    def __init__(self, between) -> None:
        super().__init__(8, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = 1 * x
        scale = self._scale(x)
        self.between(x)
        return x * scale


EXCITED = {"input changes": (lambda x: x.add_(1), 0), "a copy of it changes": (lambda x: (2 * x).add_(1), 1)}


@pytest.mark.parametrize("name", EXCITED)
def test_the_input_of_a_squeeze_and_excitation(name):
    between, found = EXCITED[name]
    plain = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), Excited(between)).double().requires_grad_(False)
    fused = copy.deepcopy(plain)
    report = fuse_all(fused)
    x = torch.randn(2, 8, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), plain(x))
    assert len(report.excitations) == found


class Outside(nn.Module):
    """Its BatchNorm is called outside of a chain, which keeps the statistics for backward, and then in a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = conv(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.norm(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_count_no_versions(dtype):
    """PyTorch's BatchNorm moves its statistics without a new version, so autograd lets it be called again."""
    model = Outside().requires_grad_(False)
    model.norm.requires_grad_(True)
    fused, x = copy.deepcopy(model), torch.randn(2, 4, 5, 5)
    report = fuse_all(fused)
    for each in (model, fused):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            each(x).sum().backward()
    assert report.fused == 1
    assert fused.norm.running_mean._version == model.norm.running_mean._version
