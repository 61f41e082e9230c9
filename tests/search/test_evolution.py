"""Operators, settings, resumption."""

from __future__ import annotations

import json
import random

import pytest

from nasfast.config import ConfigError
from nasfast.search import History, Limits, SearchConfig, evolve, run_search, top_k
from nasfast.search.evolution import crossover, mutate
from nasfast.search.limits import read_limits
from nasfast.spaces import mobilenet_v2


@pytest.fixture
def config(small_space, all_archs):
    macs = sorted(small_space.cost(a).macs for a in all_archs)
    sizes = {"population": 20, "generations": 5, "parents": 4, "crossovers": 10, "mutations": 10}
    return SearchConfig(method="evolution", top_k=3, max_macs=macs[len(macs) // 3], **sizes)


def test_mutation_redraws_each_layer_with_the_given_probability():
    rng, options = random.Random(0), [tuple(range(6))] * 20
    arch = (0,) * 20
    changed = sum(v != 0 for _ in range(2000) for v in mutate(arch, options, rng, prob=0.1))
    # a redraw keeps the value one time in six
    assert changed / 40000 == pytest.approx(0.1 * 5 / 6, rel=0.05)
    assert mutate(arch, options, rng, prob=0.0) == arch


def test_crossover_takes_each_layer_from_either_parent():
    rng = random.Random(0)
    children = [crossover((0,) * 20, (1,) * 20, rng) for _ in range(1000)]
    assert sum(map(sum, children)) / 20000 == pytest.approx(0.5, abs=0.02)


def test_evaluates_each_legal_architecture_once(small_space, make_table, config):
    table, seen = make_table(small_space, 0), []

    def score(arch):
        seen.append(arch)
        return table.score(arch)

    found = evolve(small_space, score, config)
    assert len(seen) == len(set(seen)) == 100
    assert all(read_limits(config, small_space).admits(small_space.cost(a), a) for a in seen)
    assert [c.score for c in found] == sorted((table.score(a) for a in seen), reverse=True)[:3]
    assert not any(c.optimal or c.bound is not None for c in found)


@pytest.mark.slow
def test_beats_its_own_random_generation_and_nears_the_exact_answer(make_table):
    space = mobilenet_v2()
    table = make_table(space, 1)
    config = SearchConfig(method="evolution", top_k=1, max_macs=475e6)
    (evolved,) = run_search(table, space, config)
    (first,) = run_search(table, space, config.replace(generations=1))
    (exact,) = top_k(table, space, read_limits(config, space), k=1)
    assert first.score < evolved.score <= exact.score + 1e-9
    assert exact.score - evolved.score < 0.25 * (exact.score - first.score)


def test_ends_when_everything_was_seen(small_space, all_archs, make_table, config):
    few = Limits(max_macs=sorted(small_space.cost(a).macs for a in all_archs)[10])
    legal = [a for a in all_archs if few.admits(small_space.cost(a), a)]
    table = make_table(small_space, 0)
    found = evolve(small_space, table.score, config.replace(max_macs=few.max_macs, top_k=50))
    assert sorted(c.arch for c in found) == sorted(legal)


@pytest.mark.parametrize("torn", [False, True])
def test_a_killed_search_resumes_to_the_same_result(tmp_path, small_space, make_table, config, torn):
    table, path = make_table(small_space, 0), tmp_path / "history.jsonl"
    whole = evolve(small_space, table.score, config)

    calls = []

    def dies(arch):
        if len(calls) == 47:
            raise KeyboardInterrupt
        calls.append(arch)
        return table.score(arch)

    with pytest.raises(KeyboardInterrupt):
        evolve(small_space, dies, config, history=History(path, small_space, scorer="t"))
    if torn:
        path.write_bytes(path.read_bytes()[:-9])

    rest = []

    def counts(arch):
        rest.append(arch)
        return table.score(arch)

    assert evolve(small_space, counts, config, history=History(path, small_space, scorer="t")) == whole
    assert len(rest) == 100 - 47 + torn
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 101
    assert {"arch", "score", "macs", "params", "generation", "origin", "digest"} == set(lines[-1])
    assert {line["origin"] for line in lines[1:]} == {"random", "mutation", "crossover"}


def test_history_of_another_scorer_or_space_is_refused(tmp_path, small_space, make_table, config):
    path = tmp_path / "history.jsonl"
    run_search(make_table(small_space, 0), small_space, config, history=path)
    with pytest.raises(ConfigError, match="scorer 'indicator table"):
        run_search(make_table(small_space, 1), small_space, config, history=path)
    with pytest.raises(ConfigError, match="fingerprint"):
        History(path, mobilenet_v2(), scorer="t")


@pytest.mark.parametrize(
    "damage",
    [lambda line: b"{not json", lambda line: line.replace(b"0", b"1", 1), lambda line: b"\xff" + line],
    ids=["not JSON", "other digits", "not text"],
)
def test_damaged_lines_are_named_and_evaluated_again(tmp_path, small_space, make_table, config, caplog, damage):
    table, path = make_table(small_space, 0), tmp_path / "history.jsonl"
    whole = evolve(small_space, table.score, config, history=History(path, small_space, scorer="t"))
    lines = path.read_bytes().splitlines()
    good, lines[4] = lines[4], damage(lines[4])
    path.write_bytes(b"\n".join(lines) + b"\n")
    again = []

    def counts(arch):
        again.append(arch)
        return table.score(arch)

    assert evolve(small_space, counts, config, history=History(path, small_space, scorer="t")) == whole
    assert again == [tuple(json.loads(good)["arch"])]
    assert "history.jsonl: line 5 is damaged" in caplog.text


def test_a_damaged_first_line_is_an_error(tmp_path, small_space):
    path = tmp_path / "history.jsonl"
    History(path, small_space, scorer="t").add((0,) * 6, 1.0)
    path.write_bytes(path.read_bytes().replace(b'"scorer": "t"', b'"scorer": "u"'))
    with pytest.raises(ConfigError, match="history.jsonl: the first line, .* is damaged .*search again"):
        History(path, small_space, scorer="t")


def test_nan_score_is_an_error(small_space, config):
    with pytest.raises(ValueError, match="NaN"):
        evolve(small_space, lambda arch: float("nan"), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"population": 0}, "population must be at least 1"),
        ({"crossovers": 40}, "their sum must be at most population=50"),
        ({"mutation_prob": 1.5}, r"mutation_prob must be in \[0, 1\]"),
        ({"max_macs": -1.0}, "max_macs must be positive"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        SearchConfig.from_dict(changes)
