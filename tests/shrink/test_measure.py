"""Scores and matrices, beside whole networks and plain loops."""

import math

import pytest
import shrinkable
import torch
from tolerances import assert_close
from torch.nn import functional

from nasfast import search_table, shrink
from nasfast.search import InfeasibleConstraintError, pareto_front
from nasfast.shrink.measure import _see_inputs


def reference_divergence(expected, got):
    p, q = expected.softmax(1), got.softmax(1)
    return float((p * (p / q).log()).sum(1).mean())


def test_inputs_are_those_of_the_convolution(found):
    images = shrinkable.images(6)
    inputs = _see_inputs(found, images, 4, 0)["second_basic.second.0"]
    net, seen = found.model, []
    handle = net.second_basic.second[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    net(images)
    handle.remove()
    # 8 x 8 pixels: all are seen
    rows = functional.unfold(seen[0], 3, padding=1).transpose(1, 2).reshape(-1, 16 * 9)
    assert inputs.samples == len(rows)
    assert_close("mean", inputs.mean.float(), rows.mean(0))
    assert_close("covariance", inputs.covariance.float(), torch.cov(rows.T, correction=0))


def test_every_score_is_the_divergence_of_the_network_with_this_change(found, measured):
    images = shrinkable.images()[:16]
    with torch.no_grad():
        expected, largest = found.model(images), 0.0
        for i, place in enumerate(found.places):
            for value, kept in enumerate(place.candidates):
                arch = (*found.full[:i], value, *found.full[i + 1 :])
                changed = [k for k, w in zip(kept or (), place.widths, strict=False) if k != w[-1]]
                if len(changed) > 1:
                    continue  # the sum of two
                got = reference_divergence(expected, shrink.cut(measured, arch)(images))
                largest = max(largest, got)
                assert math.isclose(got, -measured.table.scores[i][value], rel_tol=1e-5, abs_tol=1e-9)
    assert largest > 0.1


def test_two_widths_of_a_choice_have_the_sum_of_their_scores(found, measured):
    (i,) = (i for i, place in enumerate(found.places) if len(place.dimensions) == 2)
    values = {kept: -measured.table.scores[i][v] for v, kept in enumerate(found.places[i].candidates)}
    assert values[4, 8] == pytest.approx(values[4, 16] + values[16, 8])


def test_the_network_itself_loses_nothing(found, measured):
    assert measured.table.score(found.full) == 0
    with torch.no_grad():
        images = shrinkable.images(4)
        assert torch.equal(shrink.cut(measured, found.full)(images), found.model(images))


def test_the_divergence_from_labels_is_a_cross_entropy():
    labels = torch.tensor([2, 0, 1])
    logits = torch.tensor([[0.1, 0.3, 1.0], [1.2, 0.4, 0.1], [0.7, 0.2, 0.1]], dtype=torch.float64)
    losses = [torch.nn.functional.cross_entropy(f / 100 * logits, labels).item() for f in range(1, 1000)]
    assert shrink.divergence(shrink.label_logits(labels, 3), logits) == pytest.approx(min(losses), rel=1e-4)


def test_a_divergence_is_that_at_the_best_factor_of_the_logits():
    generator = torch.Generator().manual_seed(0)
    expected, logits = (torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    logits += expected
    got = shrink.divergence(expected, 3 * logits)
    assert got == pytest.approx(
        min(reference_divergence(expected, f / 1000 * logits) for f in range(1, 2000)), rel=1e-5
    )
    assert got < 0.9 * reference_divergence(expected, logits)
    assert shrink.divergence(expected, 0.2 * expected) == pytest.approx(0, abs=1e-12)
    assert shrink.divergence(expected, logits * math.inf) == math.inf


def test_limits_fronts_and_ranges_work_as_for_other_spaces(found, measured):
    best = search_table(measured.table, found.space, max_macs=0.5 * found.macs, max_params=0.7 * found.params)[0]
    assert best.optimal and best.macs <= 0.5 * found.macs and best.params <= 0.7 * found.params
    front = pareto_front(measured.table, found.space)
    assert front[-1].macs <= found.macs and front[-1].score >= 0
    within = max((p for p in front if p.macs <= 0.5 * found.macs), key=lambda p: p.score)
    alone = search_table(measured.table, found.space, max_macs=0.5 * found.macs)[0]
    assert within.score == pytest.approx(alone.score)
    with pytest.raises(InfeasibleConstraintError, match="81,768 MACs to"):
        search_table(measured.table, found.space, max_macs=1)


@pytest.mark.parametrize("value", [0.0, 300.0])
def test_inputs_that_never_change_leave_the_weights_and_go_into_the_bias(value):
    """As of a layer that died, and where the square of a mean leaves more by rounding than the variance."""
    net = shrinkable.small()
    norm = net.basic.first[1]
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(value)
    found = shrink.find(net, shrinkable.images(1), multiple=4, widths=4)
    measured = shrink.measure(found, shrinkable.images(), score_images=8)
    (i,) = (i for i, place in enumerate(found.places) if place.name == "basic")
    assert all(abs(measured.table.scores[i][v]) < 1e-6 for v, kept in enumerate(found.places[i].candidates) if kept)


def test_blocks_without_a_width_that_can_be_narrowed_are_measured():
    block = shrinkable.Basic(8, 16)
    block.first[1] = torch.nn.GroupNorm(2, 16)
    net = torch.nn.Sequential(shrinkable.conv(3, 8), block, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    net.append(torch.nn.Linear(8, 3))
    found = shrink.find(net.eval(), torch.randn(1, 3, 8, 8))
    assert [place.dimensions for place in found.places] == [()]
    scores = shrink.measure(found, torch.randn(4, 3, 8, 8)).table.scores
    assert scores[0][0] < scores[0][1] == 0


def test_wrong_images_are_refused(found):
    with pytest.raises(shrink.ShrinkError, match="another size"):
        shrink.measure(found, shrinkable.images(4, size=24))
    # nine taps of 16 channels, at 4 pixels of each image
    with pytest.raises(shrink.ShrinkError, match=r"plain\.middle\.0 has 144 inputs, .* at least 3 images"):
        shrink.measure(found, shrinkable.images(1))
    with pytest.raises(shrink.ShrinkError, match=r"are torch\.float32, and find saw torch\.float64"):
        shrink.measure(found, shrinkable.images().float())
    with pytest.raises(shrink.ShrinkError, match="inputs of .* are not finite"):
        shrink.measure(found, shrinkable.images() * torch.nan)
    with pytest.raises(TypeError, match=r"shrink\.find"):
        shrink.measure(found.model, shrinkable.images(4))
