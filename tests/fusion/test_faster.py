"""What `fuse` does by default: chains run on the operator or on PyTorch, as is expected to be fastest."""

import copy
import re

import pytest
import torch
from fused_models import Candidate, conv, disturb, make, median_error, observe, set_mode, unit
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close
from torch import nn

import nasfast
from nasfast.fusion import rule
from nasfast.ops.reference import ConvBNParams, Stage

pytestmark = pytest.mark.usefixtures("native")


def block() -> nn.Sequential:
    """Three stages with different convolutions and activations."""
    return nn.Sequential(
        nn.Sequential(conv(16, 96, 1), nn.BatchNorm2d(96), nn.ReLU6()),
        nn.Sequential(conv(96, 96, 3, padding=1, groups=96), nn.BatchNorm2d(96), nn.ReLU()),
        nn.Sequential(conv(96, 32, 3, stride=2, padding=1, groups=2, bias=True), nn.BatchNorm2d(32), nn.Tanh()),
    ).requires_grad_(False)


# pixels of `block`, with results below and above what the rule asks for
@pytest.mark.parametrize(("pixels", "runs"), [(8, False), (112, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_decides_by_size(pixels, runs, dtype, executed):
    model = block().to(dtype)
    for i in (0, 1, 2):
        model[i][1].requires_grad_()
    report = nasfast.fuse(model)
    (least,) = re.findall("fused where the convolutions give ([0-9,]+) numbers", report.chains[0].runs)
    exact = copy.deepcopy(model).double()
    nasfast.unfuse(exact)
    x = torch.randn(4, 16, pixels, pixels).to(dtype)
    results = 4 * pixels**2 * (96 + 96 + 32 // 4)
    assert (results >= int(least.replace(",", ""))) == runs
    for _ in range(2):
        tolerance = BFLOAT16_CHAIN if dtype == torch.bfloat16 else FLOAT32_CHAIN
        assert_close("result", model(x), exact(x.double()), tolerance)
    assert executed == [(3, False)] * (2 if runs else 0)


def stage(out: int, per_group: int, kernel: int = 1, act: str = "relu6", **settings) -> Stage:
    tensors = [torch.empty(out, per_group, kernel, kernel), *[torch.empty(out)] * 4, None]
    return Stage(ConvBNParams(*tensors), padding=kernel // 2, act=act, **settings)


def residual_block(c_in: int = 24, c_mid: int = 144, act: str = "relu6") -> list[Stage]:
    return [stage(c_mid, c_in, 1, act), stage(c_mid, 1, 3, act, groups=c_mid), stage(c_in, c_mid, 1, "identity")]


def least(
    stages: list[Stage], dtype: torch.dtype = torch.float32, *, gradients: bool = True, trains: bool = False
) -> int | None:
    """The results from which a chain pays."""
    saving = rule.expected_saving(torch.empty(0, dtype=dtype), stages, trains=trains, gradients=gradients)
    return saving and saving.least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_pays_the_earlier_the_more_passes_it_saves(dtype):
    frozen, inference = (least(residual_block(), dtype, gradients=gradients) for gradients in (True, False))
    assert 30_000 < frozen < inference < 300_000
    # without activations, PyTorch makes fewer passes
    assert least(residual_block(act="identity"), dtype) > 1.3 * frozen
    # PyTorch convolves, and the operator saves too little
    assert least(residual_block(), dtype, trains=True) is None
    # PyTorch's pointwise convolution alone is as fast, and the operator gathers patches of a stem
    assert least([stage(8, 40, act="identity")], dtype) is None
    stem = least([stage(32, 3, 3, stride=2)], dtype)
    assert stem is not None and stem > 2 * frozen


def test_the_gradient_of_a_strided_depthwise_convolution_in_bfloat16_pays_at_once():
    stages = [stage(96, 1, 3, stride=2, groups=96)]
    frozen, inference = (least(stages, torch.bfloat16, gradients=gradients) for gradients in (True, False))
    assert 20 * frozen < inference


def test_a_type_without_operator_runs_on_pytorch(executed):
    model = block().half().train()
    report = nasfast.fuse(model)
    assert report.backend == "reference (float16 on cpu)"
    assert [chain.runs for chain in report.chains] == ["on PyTorch: the operator is not faster in float16 on cpu"]
    model(torch.randn(4, 16, 56, 56).half())
    assert executed == []


@pytest.mark.parametrize(("price", "runs"), [(0.1, 6), (0.2, 0)])
def test_a_model_in_which_few_chains_pay_is_left_to_pytorch(price, runs, executed, monkeypatch):
    monkeypatch.setattr(rule, "GUARDS_PER_NORM", price)
    # a chain that costs 1 at once, and saves it with two thirds of its pixels
    saving = rule.Saving(per_pixel=1.5 / 127**2, per_call=-1.0, results=20.0)
    monkeypatch.setattr(rule, "expected_saving", lambda *_, **__: saving)
    model = nn.Sequential(Candidate(3), Candidate(3), Candidate(3)).requires_grad_(False)
    exact = copy.deepcopy(model)
    nasfast.fuse(model)
    # each chain saves 0.5, so that the three, with 9 BatchNorms, save 1.5
    x = torch.randn(1, 4, 127, 127)
    for _ in range(2):
        assert_close("result", model(x), exact(x), FLOAT32_CHAIN)
    assert len(executed) == runs


def test_the_report_says_that_convolutions_train(executed):
    model = block()[:2].requires_grad_()
    report = nasfast.fuse(model)
    said = "on PyTorch: the operator is not faster in float32 on cpu while convolutions train"
    x = torch.randn(2, 16, 52, 52)
    assert {chain.runs for chain in report.chains} == {said}
    model(x)
    assert {chain.runs for chain in report.chains} == {said}
    with torch.no_grad():
        model(x)
    assert {chain.runs for chain in report.chains} == {"fused"}
    assert len(executed) == 1


def test_what_trains_counts_at_the_next_call(executed):
    model = block()[:2]
    nasfast.fuse(model)
    x = torch.randn(2, 16, 52, 52)
    model(x)
    assert len(executed) == 1
    model.requires_grad_(True)
    model(x)
    assert len(executed) == 1
    model.requires_grad_(False)
    model(x)
    assert len(executed) == 2


def test_bfloat16_modules_run_fused(executed):
    plain = set_mode(disturb(make("small mobilenet_v2").double()), "frozen convolutions")
    fused, eager = copy.deepcopy(plain).bfloat16(), copy.deepcopy(plain).bfloat16()
    report = nasfast.fuse(fused, only_faster=False)
    assert report.backend == "cpu (bfloat16 on cpu)"
    x = torch.randn(4, 3, 64, 64)
    want, got, usual = (observe(m, x.to(next(m.parameters()).dtype)) for m in (plain, fused, eager))
    assert sum(stages for stages, _ in executed) == report.fused
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in usual.items()}
    assert median_error(got, want) <= 1.1 * median_error(usual, want)


def test_shapes_are_computed_on_the_meta_device():
    model = block().to("meta")
    nasfast.fuse(model)
    assert model(torch.empty(2, 16, 8, 8, device="meta")).shape == (2, 32, 4, 4)


def test_errors_say_what_to_do():
    model = nn.Sequential(unit(), unit())
    nasfast.fuse(model)
    with pytest.raises(TypeError, match="fuse: model must be a torch.nn.Module, got str"):
        nasfast.fuse("model")
    with pytest.raises(AttributeError, match=r"torch.jit.script cannot compile .* call nasfast.unfuse\(model\) before"):
        torch.jit.script(model)
    with pytest.raises(ValueError, match="compiled by torch.compile, which fuses by itself; call fuse on a module"):
        nasfast.fuse(torch.compile(model))
