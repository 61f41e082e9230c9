"""The simulation of the executor: schedules by hand, and the order and repeated parts of a real run."""

from __future__ import annotations

import math
import random

import pytest
from in_process import run_tasks_here

from benchmarks import bench_scale
from benchmarks.bench_scale import NEVER, Place, Work, bound, simulate


def dies(*deaths):
    """Workers that die in (task, attempt) so many seconds after its begin."""
    found = {(task, attempt): seconds for task, attempt, seconds in deaths}
    return lambda task, attempt, saved: found.get((task, attempt), NEVER)


def test_tasks_run_in_the_given_order_and_a_worker_starts_once():
    # worker a: 1 + 10; worker b: 1 + 5, 0.5 + 7
    found = simulate([Work(10), Work(5), Work(7)], Place(2, start=1, each=0.5))
    assert found.seconds == 13.5 and found.deaths == 0
    assert found.attempts == ((0, 0, 10), (1, 0, 5), (2, 0, 7))
    assert simulate([Work(10), Work(5), Work(7)], Place(1, start=1, each=0.5)).seconds == 24


def test_a_dead_worker_repeats_what_is_behind_the_checkpoint_when_all_others_have_begun():
    # the worker of task 0 dies at 1 + 8 and another starts for task 2; task 0 goes on from 6 where task 1 has ended
    tasks = [Work(10, checkpoint=3), Work(10, checkpoint=3), Work(7, checkpoint=3)]
    found = simulate(tasks, Place(2, start=1, each=0.5), dies((0, 0, 8)))
    assert found.attempts == ((0, 0, 8), (1, 0, 10), (2, 0, 7), (0, 6, 10))
    assert found.seconds == max(9 + 1 + 7, 11 + 0.5 + 4)
    assert (found.deaths, found.repeated, found.failed) == (1, 2, 0)
    # a death on a checkpoint keeps it, and without checkpoints all is repeated
    assert simulate(tasks, Place(2), dies((0, 0, 6))).attempts[-1] == (0, 6, 10)
    assert simulate([Work(10)], Place(1), dies((0, 0, 6))).attempts == ((0, 0, 6), (0, 0, 10))


def test_a_task_fails_in_its_last_attempt_and_the_others_go_on():
    tasks = [Work(10, 4), Work(2)]
    found = simulate(tasks, Place(1, start=1, attempts=2), dies((0, 0, 5), (0, 1, 3)))
    assert found.attempts == ((0, 0, 5), (1, 0, 2), (0, 4, 7))
    assert (found.failed, found.deaths, found.seconds) == (1, 2, 1 + 5 + 1 + 2 + 3)


def test_slow_workers_and_readers_stretch_the_work():
    assert simulate([Work(10), Work(10)], Place(2, slow_share=0.5, slowdown=3)).seconds == 30
    assert simulate([Work(10)] * 4, Place(4, reading=0.5)).seconds == 20
    assert simulate([Work(10)] * 2, Place(4, reading=0.5)).seconds == 10
    # the worker dies by the clock: two seconds of work in six
    assert simulate([Work(10)], Place(1, slow_share=1, slowdown=3), dies((0, 0, 6))).attempts[0] == (0, 0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_without_deaths_is_within_the_bounds_of_any_list(seed):
    """Graham 1969: at most the mean load and the longest task together."""
    rng = random.Random(seed)
    tasks, workers = [Work(rng.uniform(1, 9)) for _ in range(rng.randint(1, 40))], rng.randint(1, 12)
    found = simulate(tasks, Place(workers))
    longest, total = max(w.seconds for w in tasks), sum(w.seconds for w in tasks)
    assert bound([tasks], workers) - 1e-9 <= found.seconds <= total / workers + (1 - 1 / workers) * longest + 1e-9


def test_deaths_cost_what_the_formula_says():
    """Each death repeats half of the seconds between checkpoints on average, and starts a worker."""
    rng, step, mean, start = random.Random(0), 10.0, 200.0, 3.0
    tasks = [Work(2000.0, step)] * 50
    found = simulate(tasks, Place(1, start, attempts=10**6), lambda *_: rng.expovariate(1 / mean))
    assert found.failed == 0
    # the mean of an exponential time, given that it is less than the step
    expected = mean - step / math.expm1(step / mean)
    assert found.repeated / found.deaths == pytest.approx(expected, rel=0.05) == pytest.approx(step / 2, rel=0.1)
    seconds = sum(w.seconds for w in tasks) + found.repeated + (found.deaths + 1) * start
    assert found.seconds == pytest.approx(seconds)


def test_searches_wait_for_their_first_phase():
    phases = bench_scale.seeds(2)
    assert [len(phase) for phase in phases] == [2, 7]
    row = bench_scale.scene(phases, Place(100), NEVER)
    assert row["seconds"] == pytest.approx(sum(phase[0].seconds for phase in phases))
    assert (row["over_bound"], row["deaths"], row["failed"]) == (1, 0, 0)
    sample = bench_scale.sample(24)
    assert len(sample) == 24 and all(w.checkpoint == NEVER for w in sample)
    assert (min(w.seconds for w in sample), max(w.seconds for w in sample)) == (74, 177)


def test_a_real_run_is_as_simulated(monkeypatch):
    """In this process, where a worker that dies is one that raises."""
    run_tasks_here(monkeypatch)
    monkeypatch.setattr(bench_scale, "_PRODUCTS", 1)

    def kill(*_):
        raise RuntimeError("killed")

    monkeypatch.setattr("os.kill", kill)
    row = bench_scale.measured(1, bench_scale._KILLS)
    assert row["attempts"] == row["simulated_attempts"]
    # by hand: 0 dies behind 7 parts and goes on from 4, 3 behind 3 and behind 10, 4 behind 6
    assert row["attempts"] == [[0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [5, 0], [0, 4], [3, 0], [4, 4], [3, 8]]
    assert row["parts"] == row["simulated_parts"] == 70 + 3 + 3 + 2 + 2
    assert row["starts"] == 1
