"""Agreement of seeds: tau against scipy, intervals by hand and by simulation, ranks by enumeration, the advice."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats
from tiny import tiny_space

from nasfast.indicators.distill import z_sum
from nasfast.indicators.scores import with_structure
from nasfast.indicators.table import IndicatorTable
from nasfast.pipeline.children import TaskError, load_result, save_result
from nasfast.pipeline.inputs import Inputs
from nasfast.pipeline.run import Run
from nasfast.pipeline.seeds import find_rivals, list_networks, run_seeds, seed_task
from nasfast.report import seeds as page
from nasfast.report.agreement import STABLE_TAU, agreement, mean_tau
from nasfast.search import Limits
from nasfast.settings import RunConfig
from nasfast.spaces import SKIP

SPACE = tiny_space()
EVERY = list(itertools.product(range(3), repeat=4))


def noisy_tables(noise: float, seeds: int, *, seed: int = 0) -> list[IndicatorTable]:
    """Tables that are one common truth with noise of their own."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(4, 3))
    rows = [truth + noise * rng.normal(size=truth.shape) for _ in range(seeds)]
    return [IndicatorTable.from_rows(SPACE, [dict(enumerate(map(float, row))) for row in table], {}) for table in rows]


def test_tau_is_the_mean_over_pairs_and_its_interval_is_that_of_the_jackknife():
    scores = np.random.default_rng(3).normal(size=(4, 30)) + np.linspace(0, 3, 30)
    found = mean_tau(scores, np.ones((1, 30)))
    tau = {(i, j): stats.kendalltau(scores[i], scores[j]).statistic for i, j in itertools.combinations(range(4), 2)}
    assert found.value == pytest.approx(np.mean(list(tau.values())))
    without = np.array([np.mean([t for pair, t in tau.items() if s not in pair]) for s in range(4)])
    error = math.sqrt(3 / 4 * ((without - without.mean()) ** 2).sum())
    assert found.high - found.value == pytest.approx(3.182446305 * error)
    assert found.value - found.low == pytest.approx(3.182446305 * error)


def test_seeds_that_agree_are_stable_and_noise_is_not():
    alike = agreement(noisy_tables(0.05, 3), Limits(), k=3)
    assert alike.stable and alike.tau.low > 0.7
    noise = agreement(noisy_tables(20.0, 3), Limits(), k=3)
    assert not noise.stable and noise.tau.low < 0.5
    assert alike.correlation > 0.9 > noise.correlation
    assert alike.seeds_needed == 1


def test_the_top_has_the_ranks_of_an_enumeration():
    tables, k = noisy_tables(0.7, 3), 4
    found = agreement(tables, Limits(), k=k)
    own = [sorted(EVERY, key=table.score, reverse=True)[:k] for table in tables]
    mean = z_sum([(table, 1.0) for table in tables], meta={})
    pool = set(itertools.chain(*own)) | set(sorted(EVERY, key=mean.score, reverse=True)[:k])
    rank = {a: np.mean([1 + sum(t.score(b) > t.score(a) for b in pool) for t in tables]) for a in pool}
    assert [p.mean_rank for p in found.top] == sorted(rank.values())[:k]
    for place in found.top:
        assert place.mean_rank == rank[place.arch]
        assert place.in_top == sum(place.arch in best for best in own)
        assert (place.macs, place.params) == (SPACE.cost(place.arch).macs, SPACE.cost(place.arch).params)


def test_limits_hold_for_the_answer_and_for_what_tau_is_measured_on():
    limits = Limits(max_macs=sorted(SPACE.cost(a).macs for a in EVERY)[20])
    found = agreement(noisy_tables(0.3, 2), limits, k=3)
    within = [a for a in EVERY if SPACE.cost(a).macs <= limits.max_macs]
    assert found.architectures == len(within) == 21
    assert all(place.macs <= limits.max_macs for place in found.top)


def test_what_was_learned_is_the_score_without_its_structure():
    tables = [with_structure(IndicatorTable(t.space, t.block, t.layer, {}, t.rule), 1.0) for t in noisy_tables(20.0, 3)]
    assert tables[0].meta["structure"] == 1.0
    plain = agreement(noisy_tables(20.0, 3), Limits(), k=2)
    found = agreement(tables, Limits(), k=2)
    assert plain.learned is None
    # each seed's own part is divided by its standard deviation, which changes no rank
    assert found.learned.value == pytest.approx(plain.tau.value, abs=1e-6)
    assert found.tau.value > found.learned.value + 0.2
    assert found.correlation == pytest.approx(plain.correlation, abs=1e-6)


def test_structure_in_common_makes_no_ranking_stable():
    tables = noisy_tables(20.0, 3)
    own = [IndicatorTable(t.space, t.block, t.layer, {}, t.rule) for t in tables]
    found = agreement([with_structure(table, 8.0) for table in own], Limits(), k=9)
    assert found.tau.low > STABLE_TAU > found.learned.low and found.top[0].in_top == 3
    assert not found.stable


def test_how_many_seeds_are_needed_by_hand():
    found = agreement(noisy_tables(1.0, 3), Limits(), k=2)
    r, n = found.correlation, found.seeds_needed
    assert 0 < r < 0.9
    assert n * r / (1 + (n - 1) * r) >= 0.9 - 1e-9 > (n - 1) * r / (1 + (n - 2) * r)
    assert found.reliability == pytest.approx(3 * r / (1 + 2 * r))


def form(right) -> dict:
    right = np.asarray(right, dtype=np.uint8)
    return {"images": len(right), "correct": np.packbits(right).tobytes().hex(), "top1": float(right.mean())}


def config(**changes) -> RunConfig:
    return RunConfig.from_dict(
        {"threads": 1, "search": {"top_k": 2}, "retrain": {"random_architectures": 2}, **changes}
    )


def rivals_of(answer, **changes) -> dict:
    cfg = config(**changes)
    return find_rivals(cfg, Inputs.of(cfg, SPACE), answer)


def test_what_is_retrained_has_equal_cost():
    answer = (1, 0, 2, 1)
    found = list_networks(answer, rivals_of(answer), 3)
    assert [(n.role, n.seed) for n in found if n.role in ("answer", "structure")] == [
        (role, seed) for role in ("answer", "structure") for seed in range(3)
    ]
    assert [n.seed for n in found if n.role.startswith("random")] == [0, 1]
    macs = SPACE.cost(answer).macs
    assert all(SPACE.cost(n.arch).macs <= 1.01 * macs for n in found)
    assert all(n.arch != answer for n in found if n.role.startswith("random"))
    # where the structural baseline is the answer, nothing is trained twice
    best = rivals_of((2, 2, 2, 2))["structure"]
    assert {n.role for n in list_networks(best, rivals_of(best), 2)}.isdisjoint({"structure"})


def test_an_answer_that_skips_layers_may_have_no_structural_baseline(tmp_path, caplog):
    cheapest = min(EVERY, key=lambda arch: SPACE.cost(arch).macs)
    answer = (cheapest[0], SKIP, cheapest[2], SKIP)
    assert "structure" not in rivals_of(answer, search={"top_k": 2, "allow_identity": True})
    assert "no structural baseline to compare with" in caplog.text
    said = " ".join(write_run(tmp_path, 0.05, 2, no_structure=True))
    assert "There is no structural baseline to compare with" in said and "is the answer itself" not in said


def test_a_resumed_run_with_other_settings_is_refused_before_anything_changes(tmp_path):
    run = Run.look(config(out=str(tmp_path), data={"source": "digits"}))
    run.save_config()
    cfg = run.cfg
    save_result(tmp_path / "seed-1", seed_task(run.cfg, 1), {"top": []})
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(TaskError, match=r"search.top_k was 2, now 3; choose another --out"):
        run_seeds(cfg.replace(search=cfg.search.replace(top_k=3)), 2, resume=True)
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert seed_task(run.cfg, 1).arguments["config"]["data"]["split_seed"] == 0, "all seeds have one validation split"
    # settings of the machine may change: the seed counts as finished
    other = Run.look(run.cfg.replace(data=cfg.data.replace(workers=7, cache_dir="elsewhere"), track=("wandb",)))
    assert load_result(tmp_path / "seed-1", seed_task(other.cfg, 1)) == ({"top": []},)


def write_run(folder, noise, seeds, *, top1=0.9, fit=0.9, missing=None, no_structure=False):
    """The files that the page reads, of seeds without training."""
    tables = noisy_tables(noise, seeds)
    found = agreement(tables, Limits(), k=2)
    for number, table in enumerate(tables):
        out = folder / f"seed-{number}"
        out.mkdir(parents=True)
        IndicatorTable.from_rows(SPACE, table.scores, {"cross_validated_tau": fit}).save(out / "indicators.json")
        (out / "metrics.jsonl").write_text(json.dumps({"stage": "supernet", "step": 1, "top1": top1}) + "\n")
    rng, answer = np.random.default_rng(0), found.top[0].arch
    trained = [
        {
            "role": n.role,
            "arch": list(n.arch),
            "seed": n.seed,
            "result": {**form(rng.random(500) < (0.9 if n.role == "answer" else 0.5)), "macs": 1, "params": 1},
        }
        for n in list_networks(answer, {} if no_structure else rivals_of(answer), seeds)
    ]
    from nasfast.pipeline.seeds import agreement_record

    content = {
        "seeds": seeds,
        "scored": [f"seed-{i}" for i in range(seeds)],
        "agreement": agreement_record(found),
        "networks": trained,
        "missing": missing or {},
        "no_structure": no_structure,
    }
    (folder / page.STABILITY_FILE).write_text(json.dumps(content))
    (folder / "config.yaml").write_text("method: dinas\n")
    return page.sentences(folder)


def test_a_stable_run_says_so_and_advises_nothing(tmp_path):
    said = write_run(tmp_path, 0.05, 3)
    assert said[0].startswith("Stable: tau between seeds is +0.9")
    assert not any(s.startswith(("Epochs", "Score", "Seeds", "More")) for s in said)
    # no other architecture of this space has the cost of the answer
    assert "points above one random architecture of equal cost (95 % interval" in " ".join(said)
    assert "Other random architectures may be better or worse." in " ".join(said)
    assert "over 500 images and the seeds of the answer)" in " ".join(said), "one training of one random architecture"
    html = page.write_stability_page(tmp_path).read_text()
    assert "stable" in html and html.count("<section") == 6


def test_an_unstable_run_says_what_would_help(tmp_path):
    sentences = write_run(tmp_path, 0.6, 2, top1=0.26, fit=0.5)
    said = " ".join(sentences)
    assert "Not stable" in said
    assert "Epochs: the supernets of seed-0, seed-1 classify at chance" in said
    assert "Score: the tables predict" in said and "0.50" in said
    assert "--seeds" in said
    assert "only the architectures: two seeds" in page.write_stability_page(tmp_path).read_text()
    noise = write_run(tmp_path / "noise", 50.0, 3)
    assert "More seeds alone would not do" in " ".join(noise)
    # a resumed run refuses other settings
    advice = [s for s in [*sentences, *noise] if "--train." in s or "--score." in s]
    assert len(advice) == 3 and all("another --out" in s for s in advice)


def test_what_is_missing_is_named(tmp_path):
    gone = {"status": "stopped", "error": "", "log": "task.log"}
    bad = {"status": "failed", "error": "DataError: <no images>", "log": "task.log"}
    said = write_run(tmp_path, 0.05, 2, missing={"networks/1/seed-0": gone, "seed-1": bad})
    assert "The time limit came first: 1 tasks are missing (networks/1/seed-0); --resume continues." in said
    assert any(s.startswith("seed-1 failed in every attempt: DataError: <no images>; its log is ") for s in said)
    html = page.write_stability_page(tmp_path).read_text()
    assert "&lt;no images&gt;" in html and "<no images>" not in html
