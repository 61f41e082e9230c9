"""Projections: fractions of the floor carry over, and what cannot be projected is refused."""

from functools import partial

import pytest

from nasfast.config import ConfigError
from nasfast.measure.cards import CARDS, Card, get_card
from nasfast.measure.config import StepTimesConfig
from nasfast.measure.floor import Conv, Machine, conv_floor, trace
from nasfast.measure.projection import Pass, passes_of, project
from nasfast.measure.step_times import step_times
from nasfast.spaces import digits_mini, mean_path
from nasfast.supernet import StandaloneNetwork

HERE = Machine(bytes=4000.0, matmul=1e30, vector=1e30)
TWICE = Card("twice", bytes=8000.0, bf16=1e30, fp32=1e30)
# reads 600 elements and 100 weights, writes 300: one second of fp32 here
CONV = Conv(macs=1, x=600, y=300, weight=100, depthwise=False)
FORWARD, BACKWARD = (partial(conv_floor, CONV, backward=backward) for backward in (False, True))


def test_a_pass_keeps_its_fraction_of_the_floor():
    (only,) = project([Pass("p", FORWARD, 4000.0)], 5000.0, HERE, TWICE, "fp32").passes
    assert only.floor_ms == pytest.approx(1000) and only.fraction == pytest.approx(0.25)
    assert only.projected_ms == pytest.approx(2000)


def test_the_rest_of_the_step_is_taken_over_and_the_label_is_there():
    found = project([Pass("p", FORWARD, 4000.0)], 5000.0, HERE, TWICE, "fp32")
    assert found.rest_ms == pytest.approx(1000) and found.step_ms == pytest.approx(3000)
    assert str(found).startswith("PROJECTION, not measured: twice")


def test_a_pass_out_of_the_cache_is_not_credited_with_more_than_the_floor():
    (only,) = project([Pass("p", FORWARD, 100.0)], 100.0, HERE, TWICE, "fp32").passes
    assert only.fraction == 1.0 and only.projected_ms == pytest.approx(500)


def test_the_card_at_hand_projects_to_itself():
    card = get_card("rtx3080")
    found = project([Pass("p", BACKWARD, 1.0)], 1.5, card.machine("bf16"), card, "bf16")
    assert found.step_ms == pytest.approx(1.5)


def test_kernels_are_matched_with_the_convolutions_of_the_network():
    space = digits_mini()
    path = mean_path(space)
    traced = trace(lambda: StandaloneNetwork(space, path), (2, space.in_channels, space.resolution, space.resolution))
    forward = [("depthwise_forward_kernel" if c.depthwise else "pointwise_forward_kernel", 1.0) for c in traced.convs]
    backward = [("pointwise_backward_kernel", 2.0)] * (len(traced.convs) - 1)
    kernels = [("elementwise", 9.0), *forward, ("softmax", 9.0), *backward]
    passes = passes_of(kernels, traced)
    want = [conv_floor(c, HERE, 4, backward=False) for c in traced.convs]
    want += [conv_floor(c, HERE, 4, backward=True) for c in traced.convs[:0:-1]]
    assert [p.floor(HERE, 4) for p in passes] == want
    assert sum(p.ms for p in passes) == len(forward) + 2 * len(backward)
    with pytest.raises(ConfigError, match="every convolution on the Triton kernels"):
        passes_of(kernels[2:], traced)


def test_unknown_cards_and_cpus_are_refused():
    with pytest.raises(ConfigError, match="unknown card 'rtx3081'.*rtx3080"):
        StepTimesConfig(project="rtx3081")
    with pytest.raises(ConfigError, match="scales kernels that were measured on a GPU, and this runs on cpu"):
        step_times(StepTimesConfig(space="digits_mini", batch=2, project="rtx3080"))
    assert all(card.bf16 > card.bytes and card.fp32 <= card.bf16 for card in CARDS.values())
