"""fuse and unfuse whole models: results, gradients, statistics, and all else that a user could notice stay the same."""

import copy
import pickle

import pytest
import torch
from fused_models import MODELS, check_same, disturb, fuse_all, make, median_error, observe, set_mode

import nasfast

MODES = ["frozen convolutions", "eval", "frozen all but BatchNorm", "all trainable", "mixed"]
# inverted residuals and shuffle units in every mode, and in two modes dense convolutions, and squeeze and excitation
FAST = {
    "small mobilenet_v2": MODES,
    "small shufflenet_v2": [MODES[0], *MODES[3:]],
    "small resnet": MODES[1:3],
    "small mobilenet_v3": MODES[:2],
}
CASES = [(name, mode) for name, modes in FAST.items() for mode in modes]
CASES += [pytest.param("small shufflenet_v2", mode, marks=pytest.mark.slow) for mode in MODES[1:3]]
# the other models in one mode each; test_float32_is_as_accurate has mobilenet_v2
CASES += [
    pytest.param(name, MODES[i % 2], marks=pytest.mark.slow)
    for i, name in enumerate(sorted(MODELS.keys() - FAST.keys() - {"mobilenet_v2"}), 1)
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_models_give_the_same(name, mode, executed):
    plain = set_mode(disturb(make(name).double()), mode)
    fused = copy.deepcopy(plain)
    report = fuse_all(fused)
    assert (report.fused, report.convolutions, len(report.chains)) == MODELS[name]
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    want = observe(plain, x)
    assert executed == []
    check_same(observe(fused, x), want)
    assert sum(stages for stages, _ in executed) == report.fused
    assert sum(residual for _, residual in executed) == sum(chain.residual for chain in report.chains)
    # what was captured is what traces let expect
    assert (report.fused, report.convolutions, len(report.chains)) == MODELS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode", "backend"),
    [
        ("mobilenet_v2", MODES[0], "cpu"),
        ("small mobilenet_v2", MODES[1], "reference"),
        ("small resnet", MODES[0], "reference"),
        ("small resnet", MODES[1], "cpu"),
    ],
    indirect=["backend"],
)
def test_float32_is_as_accurate(name, mode, backend, monkeypatch):
    monkeypatch.setenv("NASFAST_BACKEND", backend)
    plain = set_mode(disturb(make(name)), mode)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    report = fuse_all(fused)
    assert (report.fused, report.convolutions, len(report.chains)) == MODELS[name]
    x = torch.randn(4, 3, 64, 64)
    want = observe(exact, x.double())
    assert median_error(observe(fused, x), want) <= 3 * median_error(observe(plain, x), want)


@pytest.mark.parametrize("name", ["small mobilenet_v2", "small resnet", "timm/mobilenetv2_100"])
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
    report = fuse_all(model)
    assert state() == before
    assert list(model.state_dict()) == keys
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in model.state_dict().items())
    again = fuse_all(model)
    assert (again.chains, again.left) == (report.chains, report.left)
    assert state() == before
    changed = [path for (path, m), names in zip(model.named_modules(), variables, strict=True) if set(vars(m)) != names]
    assert sorted(changed) == sorted({"", *(chain.owner for chain in report.chains)})
    assert nasfast.unfuse(model) == len(changed)
    assert [set(vars(m)) for m in model.modules()] == variables
    assert state() == before
    assert nasfast.unfuse(model) == 0
    assert handle.id in model._forward_hooks


def test_copies_and_pickles_use_their_own_parameters(executed):
    fused = disturb(make("small resnet")).eval()
    fuse_all(fused)
    x = torch.randn(2, 3, 32, 32)
    want = fused(x)
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        executed.clear()
        torch.testing.assert_close(twin(x), want)
        assert len(executed) == 8
        with torch.no_grad():
            twin.layer1[0].conv1.weight.zero_()
        assert not torch.allclose(twin(x), want)
        torch.testing.assert_close(fused(x), want)
        assert nasfast.unfuse(twin) > 0
    executed.clear()
    fused(x)
    assert len(executed) == 8
