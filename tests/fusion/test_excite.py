import copy
import pickle

import pytest
import torch
from torch import nn
from torchvision.ops.misc import SqueezeExcitation

import nasfast
from nasfast import ops
from nasfast.fusion import excite

timm = pytest.importorskip("timm")


class Added(SqueezeExcitation):
    def forward(self, x):
        return super().forward(x) + x


def torchvisions(activation=nn.ReLU, gate=nn.Hardsigmoid):
    return SqueezeExcitation(12, 4, activation, gate)


class Extended(SqueezeExcitation):
    """As a later version of the library might be."""

    forward = SqueezeExcitation.forward

    def __init__(self):
        super().__init__(12, 4)
        self.more = nn.Identity()


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
    "another module": Extended,
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


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trains"])
@pytest.mark.parametrize("name", MAKERS)
def test_is_one_operator_and_undone(name, frozen, calls):
    torch.manual_seed(0)
    dtype, error = (torch.float32, 1e-5) if frozen else (torch.bfloat16, 0.1)
    module = MAKERS[name]().to(dtype).requires_grad_(not frozen)
    x = images(dtype)
    want, state = results(module, x), copy.deepcopy(module.state_dict())
    report = nasfast.fuse(module)
    assert report.excitations == ("",) and report.left == () and "1 squeeze-and-excitation: " in str(report)
    for got, expected in zip(results(module, x), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=error, atol=error)
    assert len(calls) == 1 and all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    nasfast.unfuse(module)
    module(x)
    assert len(calls) == 1 and "forward" not in vars(module)


@pytest.mark.parametrize("name", OTHERS)
def test_what_computes_something_else_is_left_alone(name, calls):
    module = OTHERS[name]().requires_grad_(False)
    want = module(images())
    assert nasfast.fuse(module).excitations == ()
    torch.testing.assert_close(module(images()), want)
    assert not calls


def test_where_it_does_not_gain_the_module_runs_itself(calls, monkeypatch):
    module = torchvisions()
    nasfast.fuse(module)
    x = images()
    module(x)  # its weights train
    module.requires_grad_(False)
    with torch.no_grad():
        module(x)
    module(x.detach())
    module(x.contiguous())
    monkeypatch.setattr(excite.squeeze, "_MIN_ELEMENTS", x.numel() + 1)
    module(x)
    assert calls == []
    monkeypatch.setattr(excite.squeeze, "_MIN_ELEMENTS", x.numel())
    module(x)
    assert calls == [("relu", "hsigmoid")]
    module.double()(x.double())
    assert len(calls) == 1
    with torch.no_grad():
        module.bfloat16()(x.bfloat16())
    assert len(calls) == 2


def test_autocast_computes_what_pytorch_computes(calls):
    module = torchvisions().requires_grad_(False)
    fused = copy.deepcopy(module)
    nasfast.fuse(fused)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            want, got = module(images(dtype)), fused(images(dtype))
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert len(calls) == 2


def test_copies_and_pickles_run_their_own_weights(calls):
    module = torchvisions().requires_grad_(False)
    nasfast.fuse(module)
    module(images())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.fc2.bias.data.fill_(10.0)
        torch.testing.assert_close(other(images()), images())
    assert len(calls) == 3


CHANGES = {
    "gate": lambda m: setattr(m, "scale_activation", nn.Sigmoid()),
    "bias": lambda m: setattr(m.fc2, "bias", nn.Parameter(torch.full((12,), 10.0), requires_grad=False)),
    "hook": lambda m: m.fc1.register_forward_hook(lambda module, args, y: y + 1),
    "act": lambda m: setattr(m, "activation", nn.GELU()),
    "forward": lambda m: setattr(m.activation, "forward", lambda z: z - 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_follows_changes_behind_its_back(change, calls):
    module = torchvisions().requires_grad_(False)
    nasfast.fuse(module)
    module(images())
    CHANGES[change](module)
    torch.testing.assert_close(module(images()), type(module).forward(module, images()))
    assert len(calls) == (2 if change in ("gate", "bias") else 1)


def test_the_blocks_of_a_network_keep_their_chains(calls):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.mobilenet_v3_small().to(memory_format=torch.channels_last).requires_grad_(False)
    report = nasfast.fuse(model, only_faster=False)
    assert (len(report.excitations), report.fused, report.convolutions, report.left) == (9, 34, 52, ())
    model(torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_())
    assert calls == [("relu", "hsigmoid")] * 9
    assert nasfast.unfuse(model) == len(report.chains)
