"""What a summary may claim of a difference: intervals by hand, their coverage in simulations, and the sentences."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from nasfast.report.findings import Comparison, advise, at_chance, compare, score_verdict


def form(right, *, macs=1000, epochs=5, ranks=1):
    """`result.json` of a network that is right where `right` is 1."""
    right = np.asarray(right, dtype=np.uint8)
    return {
        "macs": macs,
        "epochs": epochs,
        "ranks": ranks,
        "images": len(right),
        "correct": np.packbits(right).tobytes().hex(),
        "top1": float(right.mean()),
    }


def test_one_peer_by_hand():
    """Ten images, nine and seven right: d has values 1 (three times), -1 (once), 0 (six times).

    With those of Agresti and Min these are 3.5, 1.5 and 7 of twelve.
    """
    best = form([1, 1, 1, 0, 1, 1, 1, 1, 1, 1])
    peer = form([0, 0, 0, 1, 1, 1, 1, 1, 1, 1])
    found = compare(best, [peer])
    deviation = math.sqrt(5 / 12 - (2 / 12) ** 2)
    half = 100 * 1.959963985 * deviation / math.sqrt(12)
    assert (found.gain, found.peers, found.images) == (pytest.approx(20), 1, 10)
    assert (found.low, found.high) == (pytest.approx(20 - half), pytest.approx(20 + half))
    assert not found.significant
    said = found.sentence("Retrained, it")
    assert said.startswith("Retrained, it is 20.00 percentage points above one random architecture of equal cost (95 %")
    assert said.endswith("over 10 images): the difference is not significant.")
    low, high = f"{20 - half:.1f}", f"{20 + half:.1f}"
    expected = f"+20.0 points over one random network of equal cost (95 % interval {low} to {high}), not significant"
    assert found.headline == expected


@pytest.mark.parametrize("shares", [(0.9,), (0.95, 0.94)], ids=["one training", "two trainings"])
def test_three_peers_by_hand(shares):
    rng = np.random.default_rng(0)
    ours, peers = ([rng.random(400) < share for share in group] for group in (shares, (0.7, 0.72, 0.77)))
    found = compare(form(ours[0]), [form(p) for p in peers], [form(o) for o in ours[1:]])
    d = np.mean(ours, axis=0) - np.mean(peers, axis=0)
    half = [1.959963985 * math.sqrt(((d**2).sum() + 1) / 402 - (d.sum() / 402) ** 2) / math.sqrt(402)]
    for group, t in ((ours, 12.70620474), (peers, 4.302652730)):
        if len(group) > 1:
            half.append(t * np.std([one.mean() for one in group], ddof=1) / math.sqrt(len(group)))
    assert (found.gain, found.runs, found.peers) == (pytest.approx(100 * d.mean()), len(shares), 3)
    assert found.high - found.gain == pytest.approx(100 * math.hypot(*half))
    assert found.gain - found.low == pytest.approx(found.high - found.gain)
    start = f"{found.gain:+.1f} points over 3 random networks of equal cost (95 % interval {found.low:.1f} to "
    assert found.headline.startswith(start) and found.significant and "significant" not in found.headline


def test_pairing_makes_the_interval_of_a_hard_test_narrow():
    """Both fail on the same half of the images, which says nothing about their difference."""
    hard = np.arange(1000) % 2 == 0
    best, peer = ~hard, ~hard & (np.arange(1000) % 20 != 1)
    found = compare(form(best), [form(peer)])
    shuffled = compare(form(best), [form(np.random.default_rng(0).permutation(peer))])
    assert found.gain == pytest.approx(shuffled.gain) == pytest.approx(5)
    assert found.high - found.low < 0.4 * (shuffled.high - shuffled.low)
    assert found.significant


@pytest.mark.parametrize("changes", [{"macs": 1011}, {"epochs": 4}, {"ranks": 2}])
def test_results_on_other_terms_are_left_out(changes):
    best, peer = form([1, 0, 1]), form([1, 1, 0])
    assert compare(best, [form([1, 1, 0], **changes)]) is None
    assert compare(best, [peer, form([1, 1, 1], **changes)]) == compare(best, [peer])
    assert compare(best, [form([1, 0, 1, 1])]) is None


def test_the_proof_stands_beside_what_the_score_is_worth(tmp_path):
    assert "was not measured in this run" in score_verdict(tmp_path)
    (tmp_path / "rank.json").write_text(json.dumps({"verdict": "It ranks nothing."}))
    assert score_verdict(tmp_path).startswith("The proof is about the score only.")
    assert score_verdict(tmp_path).endswith("It ranks nothing.")
    for damaged in ("{", "[]", "{}", '{"verdict": 3}'):
        (tmp_path / "rank.json").write_text(damaged)
        assert "was not measured in this run" in score_verdict(tmp_path)


@pytest.mark.parametrize(("fit", "noise"), [(0.25, True), (0.8, False), (None, False)])
def test_a_table_that_predicts_few_losses_is_said_to_be_noise(tmp_path, fit, noise):
    (tmp_path / "indicators.json").write_text(json.dumps({"meta": {"cross_validated_tau": fit}}))
    assert ("is noise: its table predicts" in score_verdict(tmp_path)) == noise


@pytest.mark.parametrize(
    ("comparison", "said"),
    [
        ((2.0, 1.0, 3.0, 3, 500), "nasfast export --out r writes the files of the network"),
        (
            (-2.0, -3.0, -1.0, 3, 500),
            "nasfast export --out r --name random writes the files of a random network: these",
        ),
        (
            (1.0, -1.0, 3.0, 3, 500),
            "--retrain.random_architectures 12 --retrain.seeds 4 trains 4 times as many networks",
        ),
        ((0.1, -2.0, 2.2, 3, 500), "more trainings would not settle a difference of 0.1 points, so any of these"),
    ],
)
def test_no_advice_is_given_that_cannot_help(comparison, said):
    advice = Comparison(*comparison).next_step("r")
    assert said in advice
    assert "not settle" not in advice or "trains" not in advice


@pytest.mark.parametrize(("right", "named"), [(55, ["best", "random"]), (70, [])])
def test_networks_at_chance_are_named_with_what_helps(right, named):
    """Of 100 images of two classes: 55 right ones may be chance, 70 are not."""
    result = form([1] * right + [0] * (100 - right))
    advice = advise(Comparison(0.0, -1.0, 1.0, 1, 100), {"best": result, "random": result}, "r", classes=2)
    assert ("at chance" in advice) == bool(named)
    if named:
        assert advice.startswith("best, random are at chance, so there is nothing to compare yet; ")
        assert advice.endswith("nasfast retrain --out r --resume --retrain.train.epochs 10 trains for twice as long")


@pytest.mark.parametrize(
    ("top1", "classes", "chance"), [(0.7, 2, False), (0.54, 2, True), (0.14, 10, True), (0.16, 10, False)]
)
def test_a_supernet_at_chance(top1, classes, chance):
    assert at_chance(top1, classes) == chance
