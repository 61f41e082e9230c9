import copy

import pytest
import torch
import torch.nn.functional as F
from fused_models import make
from torch import nn
from torchvision.ops.misc import SqueezeExcitation

import nasfast
from nasfast import ops
from nasfast.fusion import excite
from nasfast.fusion.dynamo import compile_graph

timm = pytest.importorskip("timm")


class Added(SqueezeExcitation):
    def forward(self, x):
        return super().forward(x) + x


class OwnWeight(nn.Module):
    """A convolution in it has its input as its weight too; with as many images as channels, the sizes fit."""

    def __init__(self, squeeze: bool) -> None:
        super().__init__()
        self.squeeze = squeeze
        self.weight, self.bias = nn.Parameter(torch.randn(12, 12, 1, 1)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        y = x.mean((2, 3), keepdim=True)
        y = F.relu(F.conv2d(y, y if self.squeeze else self.weight, self.bias))
        return x * F.conv2d(y, self.weight if self.squeeze else y, self.bias).sigmoid()


def torchvisions(activation=nn.ReLU, gate=nn.Hardsigmoid):
    return SqueezeExcitation(12, 4, activation, gate)


MAKERS = {
    "torchvision": torchvisions,
    "torchvision, SiLU and sigmoid": lambda: torchvisions(nn.SiLU, nn.Sigmoid),
    "timm": lambda: timm.layers.SEModule(12, rd_channels=4),
    "timm's mobilenets": lambda: timm.models._efficientnet_blocks.SqueezeExcite(12, rd_channels=4),
}
OTHERS = {
    "subclass": lambda: Added(12, 4),
    "maximum": lambda: timm.layers.SEModule(12, rd_channels=4, add_maxpool=True),
    "BatchNorm": lambda: timm.layers.SEModule(12, rd_channels=4, norm_layer=nn.BatchNorm2d),
}


@pytest.fixture
def calls(monkeypatch, native):
    """The activations and gates of the calls of the operator so far."""
    made = []

    def called(x, *weights, act, gate, backend):
        made.append((act, gate))
        return ops.squeeze_excite(x, *weights, act=act, gate=gate, backend=backend)

    monkeypatch.setattr(excite.squeeze, "squeeze_excite", called)
    monkeypatch.setattr(excite.squeeze, "_MIN_ELEMENTS", 0)
    return made


def images(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 5, 6, generator=generator).to(dtype).contiguous(memory_format=torch.channels_last)
    return x.requires_grad_()


def results(module, x):
    y = module(x)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    return y, *torch.autograd.grad(y.square().sum(), wanted)


class Network(nn.Module):
    """A chain and a squeeze-and-excitation, which is captured with it."""

    def __init__(self, excitation):
        super().__init__()
        self.conv, self.norm, self.excitation = nn.Conv2d(12, 12, 1, bias=False), nn.BatchNorm2d(12), excitation

    def forward(self, x):
        return self.excitation(self.norm(self.conv(x)))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trains"])
@pytest.mark.parametrize("name", MAKERS)
def test_is_one_operator_and_undone(name, frozen, calls):
    torch.manual_seed(0)
    dtype, error = (torch.float32, 1e-5) if frozen else (torch.bfloat16, 0.1)
    network = Network(MAKERS[name]()).to(dtype).requires_grad_(not frozen)
    x = images(dtype)
    want, state = results(copy.deepcopy(network), x), copy.deepcopy(network.excitation.state_dict())
    report = nasfast.fuse(network)
    for got, expected in zip(results(network, x), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=error, atol=error)
    assert len(calls) == 1
    assert all(torch.equal(value, state[key]) for key, value in network.excitation.state_dict().items())
    assert report.excitations == ("excitation",) and report.left == ()
    assert "1 squeeze-and-excitation" in str(report)
    nasfast.unfuse(network)
    network(x)
    assert len(calls) == 1 and "forward" not in vars(network)


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_is_left_alone(name, calls):
    network = Network(OTHERS[name]()).requires_grad_(False)
    want = copy.deepcopy(network)(images())
    report = nasfast.fuse(network)
    torch.testing.assert_close(network(images()), want, rtol=1e-5, atol=1e-5)
    # a subclass that computes more still computes this
    assert len(report.excitations) == len(calls) == (name == "subclass")


@pytest.mark.parametrize("squeeze", [True, False], ids=["squeeze", "excite"])
def test_a_convolution_whose_weight_is_its_input_is_left_alone(squeeze, calls):
    network = Network(OwnWeight(squeeze)).requires_grad_(False)
    x = torch.randn(12, 12, 5, 6).contiguous(memory_format=torch.channels_last)
    want = copy.deepcopy(network)(x)
    # torch.compile raises what `fuse` would only log
    compiled = torch.compile(network, backend=compile_graph, options={"inner": "eager"})
    torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
    assert calls == []


def test_one_image_without_a_batch_is_left_alone(calls):
    module, x = torchvisions().requires_grad_(False), torch.randn(12, 5, 6)
    compiled = torch.compile(module, backend=compile_graph, options={"inner": "eager"})
    assert torch.equal(compiled(x), module(x)) and calls == []


def test_where_it_does_not_gain_pytorch_runs(calls, monkeypatch):
    network = Network(torchvisions())
    nasfast.fuse(network)
    x = images()
    network(x)  # its weights train
    network.requires_grad_(False)
    with torch.no_grad():
        network(x)
    monkeypatch.setattr(excite.squeeze, "_MIN_ELEMENTS", x.numel() + 1)
    network(x)
    assert calls == []
    monkeypatch.setattr(excite.squeeze, "_MIN_ELEMENTS", x.numel())
    nasfast.fuse(network)
    network(x)
    assert calls == [("relu", "hsigmoid")]


def test_autocast_computes_what_pytorch_computes(calls):
    network = Network(torchvisions()).requires_grad_(False)
    fused = copy.deepcopy(network)
    nasfast.fuse(fused)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            want, got = network(images(dtype)), fused(images(dtype))
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert len(calls) == 2


CHANGES = {
    "gate": lambda m: setattr(m, "scale_activation", nn.Sigmoid()),
    "bias": lambda m: setattr(m.fc2, "bias", nn.Parameter(torch.full((12,), 10.0), requires_grad=False)),
    "data": lambda m: m.fc2.bias.data.fill_(10.0),
    "hook": lambda m: m.fc1.register_forward_hook(lambda module, args, y: y + 1),
    "act": lambda m: setattr(m, "activation", nn.GELU()),
    "forward": lambda m: setattr(m.activation, "forward", lambda z: z - 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_follows_changes(change, calls):
    network = Network(torchvisions()).requires_grad_(False)
    nasfast.fuse(network)
    network(images())
    CHANGES[change](network.excitation)
    plain = copy.deepcopy(network)
    nasfast.unfuse(plain)
    torch.testing.assert_close(network(images()), plain(images()), rtol=1e-5, atol=1e-5)
    assert len(calls) == (2 if change in ("gate", "bias", "data") else 1)


def test_the_blocks_of_a_network_keep_their_chains(calls):
    model = make("small mobilenet_v3").to(memory_format=torch.channels_last).requires_grad_(False)
    report = nasfast.fuse(model, only_faster=False)
    assert (report.fused, report.convolutions) == (10, 14)
    model(torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_())
    assert calls == [("relu", "hsigmoid")] * len(report.excitations)
    assert len(report.excitations) == 2 and report.fused == 10
