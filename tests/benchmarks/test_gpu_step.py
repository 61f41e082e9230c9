"""The formula of a step on a GPU: its fit to the measured launches, and what it says of chains it has not seen."""

import math
from collections import Counter

import pytest

from benchmarks.gpu_step import (
    RECOMPUTING,
    ROWS,
    Constants,
    Launch,
    by_family,
    fit,
    held_out,
    main,
    read,
    scaled,
    schedules,
)

MEASURED = read(ROWS)
TIMES = [launch.us for launch in MEASURED.launches]
COUNTS = Counter(launch.family for launch in MEASURED.launches)


def test_the_fit_is_within_10_percent_of_each_family_and_5_of_the_step():
    constants, launches = fit(MEASURED.launches), MEASURED.launches
    us, fitted = by_family(launches, TIMES), by_family(launches, map(constants.microseconds, launches))
    assert len(launches) == 135 and us.keys() == fitted.keys()
    for family, each in us.items():
        assert fitted[family] == pytest.approx(each, rel=0.10), family
    # of the step itself, which was timed in another process, nothing was fitted
    assert sum(fitted.values()) + MEASURED.outside == pytest.approx(MEASURED.step, rel=0.05)
    assert MEASURED.step == pytest.approx(4300, rel=0.01)
    # what would be wrong in sign or in size is no cost
    assert 3 < constants.fixed < 12 and 2e12 < 1e6 / constants.byte < 4.8e12
    assert all(1e12 < 2e6 / product < 790e12 for product in constants.product.values())


def test_chains_that_were_not_fitted_are_predicted():
    """Ten constants are fitted to 132 launches; a family that runs once is not predicted."""
    launches, out = MEASURED.launches, held_out(MEASURED.launches)
    us, guessed = by_family(launches, TIMES), by_family(launches, out)
    for family in us:
        assert guessed[family] == pytest.approx(us[family], rel=0.10), family
    assert sum(out) == pytest.approx(sum(us.values()), rel=0.02)
    many = [(guess, launch.us) for guess, launch in zip(out, launches, strict=True) if COUNTS[launch.family] > 1]
    assert sum(abs(guess / us - 1) for guess, us in many) / len(many) < 0.15
    assert max(abs(guess / us - 1) for guess, us in many) < 0.45
    # half of the chains say what the other half takes
    for half in (0, 1):
        constants = fit([launch for launch in launches if launch.chain % 2 == half])
        rest = [launch for launch in launches if launch.chain % 2 != half and COUNTS[launch.family] > 1]
        total = sum(launch.us for launch in rest)
        assert sum(map(constants.microseconds, rest)) == pytest.approx(total, rel=0.05), half


def test_constants_are_found_again():
    true = Constants(5.0, 2.5e-7, {"A": 1e-8, "B": 3e-8}, {"C": 7.0})
    launches = [Launch("AB"[i % 2], i // 4, 1e6 * (i % 7 + 1), 1e7 * (i % 5 + 1)) for i in range(40)]
    launches = [launch._replace(us=true.microseconds(launch)) for launch in [*launches, Launch("C", 3, 1e6, 0)]]
    found = fit(launches)
    assert [found.fixed, found.byte, *found.product.values()] == pytest.approx([5.0, 2.5e-7, 1e-8, 3e-8])
    assert found.alone == {"C": 7.0}
    assert held_out(launches) == pytest.approx([launch.us for launch in launches])
    assert fit([launch._replace(us=launch.us + 1) for launch in launches]).fixed == pytest.approx(6.0)
    slower = scaled(found, bytes=2, products=3)
    assert slower.microseconds(Launch("B", 0, 1e6, 1e7)) == pytest.approx(5.0 + 2 * 0.25 + 3 * 0.3)
    with pytest.raises(KeyError):
        found.microseconds(Launch("D", 0, 1, 1))


def test_no_expansion_that_is_computed_again_is_faster_by_more_than_the_uncertainty():
    """Why nasfast stores every output of a convolution on a GPU."""
    chains = {launch.chain for launch in MEASURED.launches if launch.family in RECOMPUTING}
    assert chains == set(MEASURED.chains) and len(chains) == 4
    assert not {launch.family for launch in MEASURED.now} & set(RECOMPUTING) and len(MEASURED.now) == 135
    found = [schedules(MEASURED, chain) for chain in chains]
    assert all(each.stored < each.recomputed + each.deviation for each in found)
    deviation = math.hypot(*(each.deviation for each in found))
    assert sum(each.stored for each in found) < sum(each.recomputed for each in found) + deviation


def test_a_table_is_printed_and_other_files_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_step"])
    main()
    said = capsys.readouterr().out
    assert "| PointwiseForward | 44 | 841 |" in said and "measured 4.30" in said and "another GPU" in said
    (tmp_path / "rows.jsonl").write_text('{"kind": "launches", "us": 1.0, "all_us": 2.0}\n')
    with pytest.raises(ValueError, match="no launches with bytes"):
        read(tmp_path / "rows.jsonl")
