"""Cut networks are plain modules of the cost that the space gives, and their files rebuild them."""

import copy
import json
import pickle

import numpy as np
import pytest
import shrinkable
import torch
from tolerances import FLOAT32_CHAIN, assert_close
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import nasfast
from nasfast import shrink
from nasfast.spaces import ArchError


@pytest.fixture(scope="session")
def archs(found):
    rng = np.random.default_rng(0)
    return [found.space.random(rng) for _ in range(8)]


@pytest.fixture
def small(found, measured, archs):
    return shrink.cut(measured, archs[0])


def test_macs_and_parameters_are_those_of_the_space(found, measured, archs):
    for arch in [*archs, found.full, (0,) * len(found.space)]:
        net = shrink.cut(measured, arch)
        with FlopCounterMode(display=False) as counter:
            net(shrinkable.images(1))
        cost = found.space.cost(arch)
        assert counter.get_total_flops() == 2 * cost.macs
        assert sum(p.numel() for p in net.parameters()) == cost.params


class Scaled(nn.Module):
    """A block with a parameter of its own, whose layers have no BatchNorm behind them and no bias."""

    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.norm, self.scale = nn.GroupNorm(2, width), nn.Parameter(torch.ones(width, 1, 1))
        self.expand, self.project = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1, bias=False)

    def forward(self, x):
        return x + self.scale * self.project(torch.relu(self.expand(self.norm(x))))


def test_parameters_that_come_and_go_with_a_cut_are_counted():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Scaled(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    found = shrink.find(net, torch.randn(1, 3, 8, 8))
    measured = shrink.measure(found, torch.randn(8, 3, 8, 8), score_images=2)
    for value, label in enumerate(["drop", "8", "16"]):
        small = shrink.cut(measured, [value])
        assert found.space.label(0, value) == label
        assert sum(p.numel() for p in small.parameters()) == found.space.cost([value]).params


def test_modules_describe_themselves(small):
    for module in small.modules():
        if isinstance(module, nn.Conv2d):
            again = nn.Conv2d(module.in_channels, module.out_channels, module.kernel_size, groups=module.groups)
            assert again.weight.shape == module.weight.shape
        if isinstance(module, nn.BatchNorm2d):
            assert module.weight.shape == module.running_mean.shape == (module.num_features,)


def test_a_dropped_block_keeps_its_relu_only_where_it_changes_something(found, measured):
    drop = [0 if place.block is not None else full for place, full in zip(found.places, found.full, strict=True)]
    net = shrink.cut(measured, drop)
    # behind a projection, then behind a ReLU
    assert type(net.basic) is nn.ReLU and type(net.second_basic) is nn.Identity and type(net.inverted) is nn.Identity


def test_copies_state_dicts_and_programs_work(small):
    x = shrinkable.images(3)
    with torch.no_grad():
        want = small(x)
        for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
            assert torch.equal(other(x), want)
        other = copy.deepcopy(small)
        other.load_state_dict({name: tensor + 1 for name, tensor in small.state_dict().items()})
        other.load_state_dict(small.state_dict())
        assert torch.equal(other(x), want)
        program = torch.export.export(small, (x,)).module()
        assert_close("exported", program(x).float(), want)


@pytest.mark.slow
def test_onnx_computes_the_same(small, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    net, x = copy.deepcopy(small).float(), shrinkable.images(2).float()
    torch.onnx.export(net, (x,), tmp_path / "small.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert_close("onnx", torch.from_numpy(got), small(x.double()).detach(), FLOAT32_CHAIN)


def test_it_trains_and_fuses_as_any_module(small):
    small.train()
    small(shrinkable.images(4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in small.parameters())
    assert nasfast.fuse(small.float().eval()).fused


def test_frozen_parameters_stay_frozen(found, measured, archs):
    net = shrinkable.small()
    net.requires_grad_(False)
    frozen = shrink.find(net, shrinkable.images(1), multiple=4, widths=4)
    again = shrink.cut(shrink.measure(frozen, shrinkable.images(), score_images=2, batch=12), archs[0])
    assert not any(p.requires_grad for p in again.parameters())


def test_files_rebuild_the_network_on_a_fresh_one(measured, archs, tmp_path):
    for number, arch in enumerate(archs[:3]):
        net, folder = shrink.cut(measured, arch), tmp_path / str(number)
        shrink.save(net, shrink.make_recipe(measured, arch), folder)
        loaded = shrink.load(shrinkable.small(seed=7), folder)
        assert torch.equal(loaded(shrinkable.images(2)), net(shrinkable.images(2)))
        assert repr(loaded) == repr(net)


def test_files_of_another_network_or_damaged_ones_are_refused(measured, archs, tmp_path):
    net = shrink.cut(measured, archs[0])
    shrink.save(net, shrink.make_recipe(measured, archs[0]), tmp_path)
    with pytest.raises(shrink.ShrinkError, match="as many classes"):
        shrink.load(shrinkable.small(classes=6), tmp_path)
    recipe = tmp_path / "recipe.json"
    data = json.loads(recipe.read_text())
    data["slices"][0]["rows"] = data["slices"][0]["rows"] or [0]
    data["dropped"] = []
    data["resolution"] = 99
    recipe.write_text(json.dumps(data))
    with pytest.raises(shrink.ShrinkError, match="save it again"):
        shrink.load(shrinkable.small(), tmp_path)
    recipe.unlink()
    with pytest.raises(FileNotFoundError, match=r"recipe\.json"):
        shrink.load(shrinkable.small(), tmp_path)


def test_architectures_of_other_spaces_are_refused(found, measured):
    with pytest.raises(ArchError, match="7 values"):
        shrink.cut(measured, (0, 0))
    with pytest.raises(TypeError, match=r"shrink\.measure"):
        shrink.cut(found, found.full)


class Written(shrinkable.Small):
    """Its forward has a width as a number."""

    def forward(self, x):
        x = self.down(self.inverted(nn.functional.relu6(self.stem(x))))
        x = self.plain(self.grouped(self.second_basic(self.basic(x))))
        x = torch.relu(self.head(x)).mean((2, 3))
        return self.classifier(x.reshape(-1, 24))


def test_a_width_that_is_written_as_a_number_is_named():
    net = Written().double().eval()
    found = shrink.find(net, shrinkable.images(1), multiple=4, widths=4)
    measured = shrink.measure(found, shrinkable.images(8), score_images=2)
    with pytest.raises(shrink.ShrinkError, match="sizes of its tensors"):
        shrink.cut(measured, (*found.full[:-1], 0))
