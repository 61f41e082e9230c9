"""Variants of a step: same work, ratios, memory in a fresh process; and the saved bytes of the harness."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from benchmarks import draw_steps, steps
from benchmarks.bench_steps import SupernetWorkload
from benchmarks.harness import saved_bytes
from benchmarks.steps import VARIANTS
from nasfast.spaces import digits_mini, mean_path

WORKLOAD = SupernetWorkload("digits_mini", 4, 32, mean_path(digits_mini()))
QUICK = [name for name, variant in VARIANTS.items() if variant.engine != "compile"]


def test_variants_train_the_same_parameters_of_the_same_network():
    """Every BatchNorm on the path, and the same gradients from eager and from nasfast."""
    grads = {}
    for name in ("nasfast fp32", "eager contiguous fp32"):
        step = steps.make_step(WORKLOAD, VARIANTS[name])
        step()
        used = [p.grad for p in step.model.parameters() if p.grad is not None]
        grads[name] = sorted(float(g.abs().sum()) for g in used)
        assert all(g.ndim == 1 for g in used)
    ours, eager = grads.values()
    assert ours == pytest.approx(eager, rel=1e-2, abs=1e-4)


def test_a_variant_that_computes_something_else_is_not_timed():
    made = {name: steps.make_step(WORKLOAD, VARIANTS[name]) for name in QUICK}
    dtypes = {name: VARIANTS[name].dtype for name in QUICK}
    steps.check_losses(made, dtypes)
    with torch.no_grad():
        made["eager channels_last fp32"].model.classifier.weight.mul_(3.0)
    with pytest.raises(RuntimeError, match="eager channels_last fp32 has loss .* not the same work"):
        steps.check_losses(made, dtypes)


def test_ratios_are_to_the_best_peer():
    medians = {
        "nasfast fp32": 4.0,
        "nasfast bf16": 3.0,
        "eager contiguous fp32": 20.0,
        "eager channels_last fp32": 8.0,
        "eager channels_last bf16": 10.0,
    }
    times = {name: {"step": {"median_ms": ms}} for name, ms in medians.items()}
    ratios = steps.ratios_to_peers([VARIANTS[name] for name in medians], times)
    assert ratios["nasfast fp32"]["same_dtype"] == {"peer": "eager channels_last fp32", "ratio": 0.5}
    assert ratios["nasfast bf16"]["same_dtype"] == {"peer": "eager channels_last bf16", "ratio": 0.3}
    assert ratios["nasfast bf16"]["all"] == {"peer": "eager channels_last fp32", "ratio": 0.375}


def test_running_statistics_are_not_kept():
    network = steps.train_batch_norms(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    network(torch.randn(2, 3, 4, 4)).sum().backward()
    assert network[0].weight.grad is None
    assert network[1].weight.grad is not None
    assert not list(network.buffers())


@pytest.mark.slow
def test_one_row(capsys, monkeypatch):
    """Its memory is measured in this process, because a new one takes seconds to start."""
    monkeypatch.setattr(steps, "measure_memory", steps.step_memory)
    row = steps.bench(WORKLOAD, [VARIANTS["nasfast fp32"]], rounds=2, threads=1, quick=True)
    json.dumps(row)
    assert row["macs_per_image"] == digits_mini().cost(WORKLOAD.path).macs
    for result in row["variants"].values():
        memory = result["memory"]
        # resident memory sees at least what hooks see, up to a few pages that were there before
        assert memory["peak"] > 0.5 * memory["saved"] > 0
        assert result["fraction_of_floor"] > 0
    steps.show(row)
    assert "nasfast fp32: step" in capsys.readouterr().out


class _KeepsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_saved_bytes_count_storages_once():
    x, w = torch.randn(10, requires_grad=True), torch.randn(10, requires_grad=True)
    assert saved_bytes(lambda x: x.exp(), [x]) == 40
    # both factors, and the view of one of them is no other storage
    assert saved_bytes(lambda x: x * w, [x]) == 80
    assert saved_bytes(lambda x: (x.view(2, 5) * w.view(2, 5)) * x.view(2, 5), [x]) == 120
    assert saved_bytes(lambda x: x * w, [x], exclude=[w]) == 40
    assert saved_bytes(_KeepsOutput.apply, [x]) == 40
    assert saved_bytes(lambda x: x + 1, [x]) == 0


def test_the_picture_of_readme_has_the_results():
    assert draw_steps.PICTURE.read_text() == draw_steps.picture(draw_steps.steps()), "python -m benchmarks.draw_steps"
