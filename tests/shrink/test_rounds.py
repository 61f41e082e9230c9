"""Search over tables that measured networks correct."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import shrinkable
import torch

from nasfast import shrink
from nasfast.search import InfeasibleConstraintError, Limits
from nasfast.shrink.rounds import correct


@pytest.fixture(scope="module")
def held_out(found):
    images = shrinkable.images(12, seed=5)
    with torch.no_grad():
        return images, found.model(images)


def test_results_are_measured_networks_within_the_limit_best_first(found, measured, held_out):
    images, logits = held_out
    results = shrink.search_measured([measured], [images], logits, top_k=3, rounds=3, max_macs=0.6 * found.macs)
    assert len(results) >= 3 and len({r.arch for r in results}) == len(results)
    uniform = shrink.uniform_widths(found, Limits(max_macs=0.6 * found.macs))
    assert [r.arch for r in results if r.round == 0] == [uniform]
    assert [r.divergence for r in results] == sorted(r.divergence for r in results)
    for r in results:
        assert r.macs <= 0.6 * found.macs and found.space.cost(r.arch).macs == r.macs
        with torch.no_grad():
            got = shrink.divergence(logits, shrink.cut(measured, r.arch)(images))
        assert r.divergence == pytest.approx(got)
        assert r.predicted == pytest.approx(-measured.table.score(r.arch))


def test_a_corrected_table_gives_what_was_measured(found, measured):
    archs = [tuple(max(v - d, 0) for v in found.full) for d in (1, 2)]
    sums = [-measured.table.score(arch) for arch in archs]
    table = correct(measured, list(zip(archs, [1.8 * s for s in sums], strict=True)))
    for arch, total in zip(archs, sums, strict=True):
        assert -table.score(arch) == pytest.approx(1.8 * total, rel=0.02)
    # the factor is common: a network that was not measured has it, too
    other = (0, *found.full[1:])
    assert -table.score(other) == pytest.approx(-1.8 * measured.table.score(other), rel=0.2)
    assert correct(measured, []) is measured.table


def test_a_network_without_a_loss_corrects_nothing(found, measured):
    arch, other = found.full, (0, *found.full[1:])
    assert measured.table.score(arch) == 0
    table = correct(measured, [(arch, 0.0), (other, 2 * -measured.table.score(other))])
    alone = correct(measured, [(other, 2 * -measured.table.score(other))])
    for row, want in zip(table.scores, alone.scores, strict=True):
        assert row == pytest.approx(want)


def test_a_network_whose_logits_are_not_finite_is_last_and_corrects_nothing(found, measured, held_out, monkeypatch):
    images, logits = held_out
    # the network itself comes first
    losses = itertools.chain([0.0, math.inf], itertools.repeat(0.5))
    monkeypatch.setattr("nasfast.shrink.rounds.divergence", lambda *_: next(losses))
    results = shrink.search_measured([measured], [images], logits, top_k=2, rounds=3, max_macs=0.6 * found.macs)
    assert [r.divergence for r in results] == [*[0.5] * (len(results) - 1), math.inf]


def test_several_sizes_are_searched_together(found, measured, held_out):
    images, logits = held_out
    less = shrink.find(found.model, shrinkable.images(1, size=12), multiple=4, widths=4)
    smaller = [shrinkable.images(count, size=12, seed=seed) for count, seed in ((48, 1), (12, 5))]
    other = shrink.measure(less, smaller[0], score_images=16)
    assert less.macs < found.macs
    limit = 0.9 * less.macs
    results = shrink.search_measured([measured, other], [images, smaller[1]], logits, top_k=2, rounds=2, max_macs=limit)
    assert {id(r.measured) for r in results} == {id(measured), id(other)}
    # what is predicted begins with the divergence of the smaller images
    with torch.no_grad():
        base = shrink.divergence(logits, less.model(smaller[1]))
    for r in results:
        start = base if r.measured is other else 0.0
        assert r.predicted == pytest.approx(start - r.measured.table.score(r.arch))
    # a limit that one size alone can meet
    least = found.space.cost((0,) * len(found.space)).macs
    tight = shrink.search_measured([measured, other], [images, smaller[1]], logits, rounds=1, max_macs=least - 1)
    assert {id(r.measured) for r in tight} == {id(other)}
    with pytest.raises(InfeasibleConstraintError):
        shrink.search_measured([measured, other], [images, smaller[1]], logits, max_macs=1)
    with pytest.raises(shrink.ShrinkError, match="give each"):
        shrink.search_measured([measured], [], logits, max_macs=limit)


def latency_of(found: shrink.Found, path: Path) -> Callable[[shrink.Found, tuple[int, ...]], float]:
    """Writes a table by which every network takes two thirds of the milliseconds that the function gives."""
    rows = found.space.option_costs()
    entries = [
        {"layer": layer, "choice": value, "value": cost.macs / 1e4}
        for layer, row in enumerate(rows)
        for value, cost in row.items()
    ]
    path.write_text(json.dumps({"quantity": "latency", "unit": "ms", "entries": entries}))

    def milliseconds(of: shrink.Found, arch: tuple[int, ...]) -> float:
        assert of is found
        return 1.5 * sum(row[value].macs for row, value in zip(rows, arch, strict=True)) / 1e4

    return milliseconds


def test_results_are_within_a_limit_of_latency_as_measured(found, measured, held_out, tmp_path):
    images, logits = held_out
    path = tmp_path / "latency.json"
    milliseconds = latency_of(found, path)
    limit = 0.7 * milliseconds(found, found.full)
    options = {"latency_tables": [path], "top_k": 3, "max_latency_ms": limit}
    believed = shrink.search_measured([measured], [images], logits, **options)
    assert milliseconds(found, believed[0].arch) > limit and believed[0].latency_ms is None
    results = shrink.search_measured([measured], [images], logits, latency=milliseconds, **options)
    assert [r.divergence for r in results] == sorted(r.divergence for r in results)
    for r in results:
        assert r.latency_ms == milliseconds(found, r.arch) == pytest.approx(1.5 * r.predicted_ms)
        assert r.latency_ms <= limit
    assert results[0].latency_ms > 0.8 * limit
    assert results.latency_factors == (pytest.approx(1.5),) and believed.latency_factors == (1.0,)
    timed = []

    def slower(of: shrink.Found, arch: tuple[int, ...]) -> float:
        timed.append(arch)
        return milliseconds(of, arch) * (1 if len(timed) <= 2 else 1.3)

    # by uniform widths, the first two, the table is less wrong: the networks of the first round are above the limit, so
    # others follow until one is within
    first = shrink.search_measured([measured], [images], logits, latency=slower, rounds=1, **options)
    assert timed[1] in {r.arch for r in first} and {r.round for r in first} == {0, 2}
    with pytest.raises(InfeasibleConstraintError, match=re.escape(f"the nearest takes {1e3 * limit:.4g} ms")):
        shrink.search_measured([measured], [images], logits, latency=lambda *_: 1e3 * limit, **options)


def test_a_network_above_the_limit_as_measured_leaves_its_place_to_the_next(found, measured, held_out, tmp_path):
    """By the median of the factors, what is too slow is within the limit, and is the best of the table still."""
    images, logits = held_out
    path = tmp_path / "latency.json"
    milliseconds = latency_of(found, path)
    limit, timed = 0.7 * milliseconds(found, found.full), []

    def latency(of: shrink.Found, arch: tuple[int, ...]) -> float:
        timed.append(arch)  # uniform widths are the first two
        return milliseconds(of, arch) * (1.2 if len(timed) == 3 else 1.0)

    results = shrink.search_measured(
        [measured], [images], logits, latency_tables=[path], latency=latency, top_k=1, max_latency_ms=limit
    )
    assert results.latency_factors == (pytest.approx(1.5),) and 1.2 * milliseconds(found, timed[2]) > limit
    assert timed[2] not in {r.arch for r in results} and {r.round for r in results} > {0}


def test_the_factor_of_latencies_is_that_of_all_timed_networks_also_without_a_result(
    found, measured, held_out, tmp_path
):
    """At the second size, whose networks are all above the limit as measured, there is a factor and no result."""
    images, logits = held_out
    path = tmp_path / "latency.json"
    milliseconds = latency_of(found, path)
    slow = dataclasses.replace(measured, found=dataclasses.replace(found))

    def latency(of: shrink.Found, arch: tuple[int, ...]) -> float:
        return milliseconds(found, arch) if of is found else 1e3 * milliseconds(found, arch)

    limit = 0.7 * milliseconds(found, found.full)
    results = shrink.search_measured(
        [measured, slow], [images] * 2, logits, latency_tables=[path] * 2, latency=latency, max_latency_ms=limit
    )
    assert {id(r.measured) for r in results} == {id(measured)}
    assert results.latency_factors == (pytest.approx(1.5), pytest.approx(1.5e3))


def test_what_is_too_slow_as_measured_is_narrowed_by_its_own_factor():
    tried = []

    def time(arch: tuple[int, ...]) -> tuple[float, float]:
        tried.append(arch[0])
        return 1.2 * arch[0], arch[0]

    assert shrink.narrowed(lambda ms: (int(ms),), time, 60.0) == (50,) and tried == [60, 50]
    assert shrink.narrowed(lambda ms: (int(ms),), time, 60.0, factor=1.2) == (50,)
    assert shrink.narrowed(lambda ms: (int(ms),) if ms > 55 else None, time, 60.0) is None
