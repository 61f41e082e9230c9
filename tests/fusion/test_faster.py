"""What `fuse` does by default: chains run on the operator or on PyTorch, as is expected to be fastest."""

import copy

import pytest
import torch
from fused_models import Candidate, conv, disturb, make, median_error, observe, set_mode, unit
from tolerances import BFLOAT16_CHAIN, FLOAT32_CHAIN, assert_close
from torch import nn

import nasfast
from nasfast.fusion import rule

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(autouse=True)
def avx512(monkeypatch):
    """The rule takes the numbers of AVX-512 on every machine."""
    if rule._native.extension is not None:
        monkeypatch.setattr(type(rule._native.extension), "isa", lambda _: "avx512")


def block() -> nn.Sequential:
    """Three stages with different convolutions and activations."""
    return nn.Sequential(
        nn.Sequential(conv(16, 96, 1), nn.BatchNorm2d(96), nn.ReLU6()),
        nn.Sequential(conv(96, 96, 3, padding=1, groups=96), nn.BatchNorm2d(96), nn.ReLU()),
        nn.Sequential(conv(96, 32, 3, stride=2, padding=1, groups=2, bias=True), nn.BatchNorm2d(32), nn.Tanh()),
    ).requires_grad_(False)


# pixels of `block`: results below and above what the rule asks for
@pytest.mark.parametrize(("pixels", "runs"), [(8, False), (112, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_rule_decides_by_size(pixels, runs, dtype, executed):
    model = block().to(dtype)
    for i in (0, 1, 2):
        model[i][1].requires_grad_()
    report = nasfast.fuse(model)
    least = 2_000_000
    assert f"fused where the convolutions give {least:,} numbers" in report.chains[0].runs
    exact = copy.deepcopy(model).double()
    nasfast.unfuse(exact)
    x = torch.randn(4, 16, pixels, pixels).to(dtype)
    results = 4 * pixels**2 * (96 + 96 + 32 // 4)
    assert (results >= least) == runs
    for _ in range(2):
        tolerance = BFLOAT16_CHAIN if dtype == torch.bfloat16 else FLOAT32_CHAIN
        assert_close("result", model(x), exact(x.double()), tolerance)
    assert executed == [(3, False)] * (2 if runs else 0)


@pytest.mark.parametrize(
    ("sizes", "settings", "dtype", "least"),
    [
        ((4, 4, 3), {"groups": 4, "padding": 1}, torch.float32, 204_082),
        ((4, 4, 1), {"stride": 2}, torch.float32, 2_000_000),
        ((3, 8, 3), {}, torch.float32, 2_000_000),
        ((40, 8, 1), {}, torch.float32, 2_000_000),
        ((40, 8, 1), {}, torch.bfloat16, 200_000),
        ((192, 8, 1), {}, torch.bfloat16, 2_000_000),
        ((192, 192, 3), {"groups": 192, "padding": 1}, torch.bfloat16, 326_531),
    ],
    ids=["depthwise", "strided pointwise", "dense", "pointwise", "shallow bf16", "deep bf16", "depthwise bf16"],
)
def test_chains_of_the_operators_own_convolutions_pay_earlier(sizes, settings, dtype, least):
    model = nn.Sequential(conv(*sizes, **settings), nn.BatchNorm2d(sizes[1])).requires_grad_(False).to(dtype)
    assert f"give {least:,} numbers" in nasfast.fuse(model).chains[0].runs


def test_a_type_without_operator_runs_on_pytorch(executed):
    model = block().half().train()
    report = nasfast.fuse(model)
    assert report.backend == "reference (float16 on cpu)"
    assert [chain.runs for chain in report.chains] == ["on PyTorch: the operator is not faster in float16 on cpu"]
    model(torch.randn(4, 16, 56, 56).half())
    assert executed == []


@pytest.mark.parametrize(("least", "runs"), [(0.1, 6), (0.2, 0)])
def test_a_model_in_which_few_chains_pay_is_left_to_pytorch(least, runs, executed, monkeypatch):
    monkeypatch.setattr(rule, "GAIN_PER_NORM", least)
    model = nn.Sequential(Candidate(3), Candidate(3), Candidate(3)).requires_grad_(False)
    exact = copy.deepcopy(model)
    nasfast.fuse(model)
    # each chain gives 1.5 times the results from which one pays, so that the three, with 9 BatchNorms, gain 1.5
    x = torch.randn(1, 4, 127, 127)
    for _ in range(2):
        assert_close("result", model(x), exact(x), FLOAT32_CHAIN)
    assert len(executed) == runs


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


@pytest.mark.parametrize(
    ("isa", "widths", "gradients", "pays"),
    [
        ("avx2", (24, 144, 24), True, True),
        ("avx2", (24, 144, 24), False, False),
        ("avx2", (64, 384, 64), True, False),
        ("baseline", (64, 384, 64), True, False),
        ("avx512bf16", (64, 384, 64), True, True),
        ("avx512", (24, 144, 24), False, True),
    ],
)
def test_without_avx512_chains_of_few_products_pay_and_only_with_gradients(isa, widths, gradients, pays, monkeypatch):
    monkeypatch.setattr(type(rule._native.extension), "isa", lambda _: isa)
    c_in, c_mid, c_out = widths
    model = nn.Sequential(
        nn.Sequential(conv(c_in, c_mid, 1), nn.BatchNorm2d(c_mid), nn.ReLU6()),
        nn.Sequential(conv(c_mid, c_mid, 3, padding=1, groups=c_mid), nn.BatchNorm2d(c_mid), nn.ReLU6()),
        nn.Sequential(conv(c_mid, c_out, 1), nn.BatchNorm2d(c_out)),
    ).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(gradients)
    (chain,) = nasfast.fuse(model).chains
    assert chain.runs.startswith("fused where" if pays else "on PyTorch")
