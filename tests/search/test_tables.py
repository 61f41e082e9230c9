"""Tables of the user's own costs as limits, as the axis of a front and as the score, against enumeration."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import pytest

from nasfast.config import ConfigError
from nasfast.indicators.table import IndicatorTable
from nasfast.search import (
    InfeasibleConstraintError,
    Limits,
    SearchConfig,
    pareto_front,
    run_search,
    sample_under,
    search_table,
    top_k,
)
from nasfast.search.limits import read_limits
from nasfast.spaces import SKIP, read_cost_table


def form_of(space, seed=0, *, unit="ms", quantity="latency", digits=3, **more) -> dict:
    """The content of a table file: decimal values, of which many sums are equal."""
    rng = random.Random(seed)
    entries = [
        {"layer": i, "choice": choice, "value": round(rng.uniform(0.1, 2), digits)}
        for i, layer in enumerate(space.layers)
        for choice in layer.options
        if choice != SKIP
    ]
    return {"quantity": quantity, "unit": unit, "fixed": 0.25, "entries": entries, **more}


@pytest.fixture
def write(tmp_path, small_space):
    """`write(form, name)` writes a table file and returns its path."""

    def write(form, name="latency.json"):
        (tmp_path / name).write_text(json.dumps(form))
        return tmp_path / name

    return write


def exact_cost(form, arch) -> Fraction:
    """The sum of the decimal numbers in the file, without rounding; a skipped layer costs nothing."""
    values = {(e["layer"], e["choice"]): Fraction(str(e["value"])) for e in form["entries"]}
    return Fraction(str(form["fixed"])) + sum(values.get((i, v), Fraction(0)) for i, v in enumerate(arch))


@pytest.mark.parametrize("digits", [1, 3])
@pytest.mark.parametrize("others", [{}, {"max_macs": 0.6}, {"max_macs": 0.6, "max_params": 0.6}], ids=str)
def test_the_exact_search_obeys_a_table(small_space, all_archs, make_table, write, digits, others):
    form, scores = form_of(small_space, digits=digits), make_table(small_space, 1)
    costs = sorted(exact_cost(form, arch) for arch in all_archs)
    limit = float(costs[len(costs) // 3])  # a sum, so that equality with the limit is tested
    table = read_cost_table(write(form), small_space)
    at = {n: sorted(getattr(small_space.cost(a), n[4:]) for a in all_archs)[int(q * 729)] for n, q in others.items()}
    limits = Limits(**at, tables=((table, limit),))
    plain = Limits(**at)
    legal = [
        a for a in all_archs if exact_cost(form, a) <= costs[len(costs) // 3] and plain.admits(small_space.cost(a), a)
    ]
    assert 10 < len(legal) < 300
    found = top_k(scores, small_space, limits, k=5)
    assert [c.arch for c in found] == sorted(legal, key=lambda a: -scores.score(a))[:5]
    assert all(c.optimal and c.values == (float(exact_cost(form, c.arch)),) for c in found)
    rng = random.Random(0)
    assert all(sample_under(small_space, rng, limits) in legal for _ in range(20))


def test_the_search_by_name_and_by_evolution(small_space, all_archs, make_table, write):
    form, scores = form_of(small_space), make_table(small_space, 2)
    path, limit = write(form), 6.0
    best = max((a for a in all_archs if exact_cost(form, a) <= limit), key=scores.score)
    (found,) = search_table(scores, small_space, max_latency_ms=limit, latency_table=path, top_k=1)
    assert (found.arch, found.values) == (best, (float(exact_cost(form, best)),))
    sizes = {"population": 20, "generations": 3, "parents": 5, "crossovers": 8, "mutations": 8}
    config = SearchConfig(method="evolution", top_k=3, max_latency_ms=limit, latency_table=str(path), **sizes)
    for candidate in run_search(scores, small_space, config):
        assert candidate.values == (float(exact_cost(form, candidate.arch)),) and candidate.values[0] <= limit


def test_a_skipped_layer_costs_nothing_unless_the_table_says_so(small_space, make_table, write):
    form, scores = form_of(small_space), make_table(small_space, 0)
    for more, cost in ((), 0.0), ([{"layer": 1, "choice": SKIP, "value": 0.125}], 0.125):
        table = read_cost_table(write({**form, "entries": form["entries"] + list(more)}), small_space)
        arch = (0, SKIP, 0, 0, SKIP, 0)
        assert table.cost(arch) == pytest.approx(float(exact_cost(form, arch)) + cost, abs=1e-12)
        least = min(table.cost((i, SKIP, SKIP, j, SKIP, SKIP)) for i in range(3) for j in range(3))
        limits = Limits(tables=((table, least),), allow_identity=True)
        (only,) = top_k(scores, small_space, limits, k=2)
        assert only.values == (least,)


@pytest.mark.parametrize("others", [(), ("macs",), ("macs", "params")], ids=str)
@pytest.mark.parametrize("levels", [None, 3])
def test_the_front_against_a_table_equals_enumeration(small_space, all_archs, make_table, write, others, levels):
    form, scores = form_of(small_space, digits=2), make_table(small_space, 3, levels=levels)
    table = read_cost_table(write(form), small_space)
    at = {f"max_{n}": sorted(getattr(small_space.cost(a), n) for a in all_archs)[450] for n in others}
    limits = Limits(**at, tables=((table, 7.0),))
    rows = sorted(
        (exact_cost(form, a), -round(scores.score(a), 9))
        for a in all_archs
        if exact_cost(form, a) <= 7 and Limits(**at).admits(small_space.cost(a), a)
    )
    expected: list = []
    for cost, loss in rows:
        if not expected or -loss > expected[-1][1]:
            expected.append((float(cost), -loss))
    front = pareto_front(scores, small_space, limits=limits, against=table)
    assert [(p.values[0], round(p.score, 9)) for p in front] == expected
    assert len(front) > 3


def test_a_table_as_the_score(small_space, all_archs, write):
    """Lower is better unless the file says otherwise."""
    form = form_of(small_space)
    for better, choose in (("lower", min), ("higher", max)):
        table = read_cost_table(write({**form, "better": better}), small_space)
        scores = IndicatorTable.from_costs(small_space, table, {"score": "mine"})
        macs = sorted(small_space.cost(a).macs for a in all_archs)[200]
        legal = [a for a in all_archs if small_space.cost(a).macs <= macs]
        (best,) = top_k(scores, small_space, Limits(max_macs=macs), k=1)
        assert exact_cost(form, best.arch) == choose(exact_cost(form, a) for a in legal)


def test_tables_of_the_settings(small_space, make_table, write):
    """Each is limited by the number behind it, or only reported; K, M and G are understood."""
    files = [write(form_of(small_space, n, quantity="energy", unit="mJ"), f"{n}.json") for n in range(3)]
    config = SearchConfig(tables=(f"{files[0]} <= 7", f"{files[1]}<=0.0071K", str(files[2])), top_k=2)
    assert [maximum for _, maximum in read_limits(config, small_space).tables] == [7.0, 7.1, None]
    for candidate in run_search(make_table(small_space, 0), small_space, config):
        forms = [json.loads(file.read_text()) for file in files]
        assert candidate.values == tuple(float(exact_cost(form, candidate.arch)) for form in forms)
        assert candidate.values[0] <= 7 and candidate.values[1] <= 7.1


# what goes wrong


def test_a_limit_that_every_architecture_meets_is_said_with_the_range(small_space, all_archs, write):
    form = form_of(small_space)
    table = read_cost_table(write(form), small_space)
    costs = [exact_cost(form, a) for a in all_archs]
    macs = [small_space.cost(a).macs for a in all_archs]
    said = Limits(max_macs=max(macs), tables=((table, float(max(costs))),)).met_by_all(small_space)
    assert len(said) == 2
    assert f"max_macs={max(macs):,}: they have {min(macs):,} MACs to {max(macs):,} MACs" in said[0]
    assert f"{float(min(costs)):g} ms to {float(max(costs)):g} ms" in said[1]
    assert Limits(max_macs=max(macs) - 1).met_by_all(small_space) == []
    form["entries"] = [{**entry, "value": 1} for entry in form["entries"]]
    (said,) = Limits(tables=((read_cost_table(write(form), small_space), 100.0),)).met_by_all(small_space)
    assert said.endswith(f"=100: they have {len(small_space) + 0.25:g} ms, and no limit chooses among them.")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"Better": "higher"}, "unknown key 'Better'; did you mean 'better'"),
        ({"beter": "higher"}, "unknown key 'beter'; did you mean 'better'"),
        ({"fixd": 3.0}, "unknown key 'fixd'; did you mean 'fixed'"),
        (
            {"entries": [{"layer": 0, "choice": 0, "value": 1.0, "vallue": 2.0}]},
            "key of entry 0 'vallue'; did you mean",
        ),
    ],
)
def test_a_misspelt_key_of_a_table_is_refused(changed, message, small_space, write):
    with pytest.raises(ConfigError, match=message):
        read_cost_table(write({**form_of(small_space), **changed}), small_space)


def test_a_table_may_begin_with_a_mark_but_has_each_key_once(small_space, write):
    path = write(form_of(small_space))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_cost_table(path, small_space).quantity == "latency"
    path.write_text(path.read_text(encoding="utf-8-sig")[:-1] + ', "better": "higher", "better": "lower"}')
    with pytest.raises(ConfigError, match="the key 'better' is there twice"):
        read_cost_table(path, small_space)


def test_unreachable_limits_name_what_can_be_reached(small_space, all_archs, make_table, write):
    form, scores = form_of(small_space), make_table(small_space, 0)
    table = read_cost_table(write(form), small_space)
    least = float(min(exact_cost(form, a) for a in all_archs))
    with pytest.raises(InfeasibleConstraintError, match=f"max_latency_ms=0.5 cannot be met: .* have {least:g} ms to "):
        top_k(scores, small_space, Limits(tables=((table, 0.5),)))
    Limits(tables=((table, least),)).check(small_space)
    macs = min(small_space.cost(a).macs for a in all_archs)
    together = Limits(max_macs=macs, tables=((table, least),))
    under = min(exact_cost(form, a) for a in all_archs if small_space.cost(a).macs == macs)
    with pytest.raises(InfeasibleConstraintError, match="cannot both be met") as caught:
        together.check(small_space)
    assert f"under max_macs={macs:,} the smallest is {float(under):g} ms" in str(caught.value)
    with pytest.raises(InfeasibleConstraintError, match="cannot all be met"):
        Limits(max_macs=macs, max_params=1e6, tables=((table, least),)).check(small_space)


def without(form, number):
    return {**form, "entries": form["entries"][:number] + form["entries"][number + 1 :]}


def changed(form, **entry):
    return {**form, "entries": [{**form["entries"][0], **entry}, *form["entries"][1:]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: [f], "expected .*quantity"),
        (lambda f: {**f, "format": "nasfast.cost_table/9"}, "format is 'nasfast.cost_table/9'"),
        (lambda f: {**f, "unit": 1}, "'unit' must be a text such as 'ms'"),
        (lambda f: {**f, "better": "up"}, "'better' must be 'lower' or 'higher', got 'up'"),
        (
            lambda f: {**f, "space": "other", "fingerprint": "00", "num_classes": 7},
            r"'other' \(00\) \(num_classes 7, not 5",
        ),
        (lambda f: without(f, 4), r"no value for layer 1 choice 1 \(k3 e4\): add"),
        (lambda f: {**f, "entries": [*f["entries"], f["entries"][0]]}, "layer 0, choice 0 is there twice"),
        (lambda f: changed(f, layer=6), "layer must be from 0 to 5, got 6"),
        (lambda f: changed(f, choice=7), "layer 0 has the choices 0, 1, 2, got 7"),
        (lambda f: changed(f, value=-0.1), r"layer 0, choice 0 \(k3 e2\): .* at least 0, got -0.1"),
        (lambda f: changed(f, value=float("nan")), "finite number of at least 0, got nan"),
        (lambda f: {**f, "entries": [{"layer": 0}]}, "entry 0 must be"),
    ],
)
def test_a_table_that_cannot_be_used_is_named(small_space, write, change, message):
    path = write(change(form_of(small_space)))
    with pytest.raises(ConfigError, match=message) as caught:
        read_cost_table(path, small_space)
    assert str(caught.value).startswith(f"{path}: ")


def test_files_that_are_no_table(small_space, tmp_path):
    with pytest.raises(ConfigError, match="cannot read the table .*absent.json: No such file.*; `nasfast latency"):
        read_cost_table(tmp_path / "absent.json", small_space)
    (tmp_path / "cut.json").write_text('{"quantity": ')
    with pytest.raises(ConfigError, match="cut.json is not JSON"):
        read_cost_table(tmp_path / "cut.json", small_space)


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ({"unit": "s"}, {}, "'latency' in 'ms', and this has 'latency' in 's'"),
        ({}, {"latency_batch": 1}, "no batch is given, and search.latency_batch is 1"),
        (
            {"device": "onnx", "batch": 8},
            {"latency_device": "cpu", "latency_batch": 1},
            "its device is 'onnx' and its batch is 8, and search.latency_device is 'cpu' and search.latency_batch is 1"
            ": measure a table with `nasfast latency --device cpu --batch 1`",
        ),
    ],
)
def test_latencies_of_another_unit_device_or_batch(small_space, write, form, settings, message):
    path = write({**form_of(small_space), **form})
    with pytest.raises(ConfigError, match=message):
        read_limits(SearchConfig(latency_table=str(path), max_latency_ms=3, **settings), small_space)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_latency_ms": 3.0}, "max_latency_ms=3 needs latency_table, a file that `nasfast latency` writes"),
        ({"max_latency_ms": -1.0, "latency_table": "t"}, "max_latency_ms must be positive and finite"),
        ({"tables": ("e.json <= nan",)}, "the limit of e.json must be positive and finite"),
        ({"tables": ("e.json <= much",)}, "expected 'FILE <= NUMBER' or 'FILE', got 'e.json <= much'"),
    ],
)
def test_meaningless_limits_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SearchConfig(**settings)


def test_large_and_small_numbers_keep_eight_digits(small_space, all_archs, write):
    for scale in (1e-9, 1e12):
        form = form_of(small_space)
        form = {**form, "fixed": 0.25 * scale, "entries": [{**e, "value": e["value"] * scale} for e in form["entries"]]}
        table = read_cost_table(write(form), small_space)
        for arch in all_archs[::100]:
            assert table.cost(arch) == pytest.approx(float(exact_cost(form, arch)), rel=1e-7)
        least = min(map(table.cost, all_archs))
        Limits(tables=((table, least),)).check(small_space)
        with pytest.raises(InfeasibleConstraintError):
            Limits(tables=((table, least * (1 - 1e-6)),)).check(small_space)


def test_a_table_with_a_large_error_says_so_wherever_it_is_used(small_space, write):
    def about(error, text="error 2.0%"):
        form = form_of(small_space, about=text, validation={"error": error, "networks": []})
        return read_cost_table(write(form), small_space).about

    warning = "this error is above 7%: smaller differences say nothing, and a limit needs such a margin"
    assert about({"median": 0.02, "q80": 0.12}) == f"error 2.0%; {warning}"
    # a user's own table may have anything under this name
    assert about({"q80": 0.05}) == about(None) == about("none") == about({"q80": "much"}) == "error 2.0%"
    assert about({"q80": 0.12}, "").startswith("the error of its validation is above 7%: ")
