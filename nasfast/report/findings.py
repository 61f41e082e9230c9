"""What a run's results prove: the best architecture against random ones, and how well the score ranks. No torch.

A summary claims a difference only if its interval excludes 0. Beside "highest score" it says how well the score ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from nasfast.display import counted
from nasfast.indicators.accuracies import top1_interval
from nasfast.indicators.table import REFINED_FILE, TABLE_FILE
from nasfast.runtime.files import answers_from_hex
from nasfast.search.sampling import EQUAL_COST_TOLERANCE

PROVEN = "proven: no other within the limits has a higher score"
"""Status of the first architecture of an exact search."""

PROVEN_NEXT = "proven: only those above have a higher score"
"""Status of the others."""

_TWO_SIDED = 0.975
# Below this, tables of two seeds hardly agree: docs/ranking.md, section 3, mobilenet_v2.
_NOISE = 0.4
# A training accuracy at most this much above chance shows no learning: with 10 classes, the accuracy over 1000 images
# scatters by 0.01.
_CHANCE_MARGIN, _LARGEST_MARGIN = 0.02, 0.05
# As many times the trainings are advised at most: more would cost more than a network is worth.
_MOST_TIMES = 20

Value = TypeVar("Value")


@dataclass(frozen=True)
class Comparison:
    """The best architecture compared with random ones of equal cost, on the same images.

    Attributes:
        gain: top-1 of the best minus the mean top-1 of the others, in percentage points.
        low, high: 95 % interval of the gain.
        peers: number of random architectures.
        images: number of images.
        runs: how often the best one was trained.
    """

    gain: float
    low: float
    high: float
    peers: int
    images: int
    runs: int = 1

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def headline(self) -> str:
        """What was gained, in one line without a full stop."""
        peers = "one random network" if self.peers == 1 else f"{self.peers} random networks"
        text = f"{self.gain:+.1f} points over {peers} of equal cost (95 % interval {self.low:.1f} to {self.high:.1f})"
        return text if self.significant else f"{text}, not significant"

    def next_step(self, out: object) -> str:
        """What would settle more, as a command and its cost; without a full stop."""
        if self.low > 0:
            return f"nasfast export --out {out} writes the files of the network, for use without nasfast"
        if self.high < 0:
            return f"nasfast export --out {out} --name random writes the files of a random network: these are better"
        # the interval shrinks with the root of both numbers; the gain is taken as it is
        times = max(2, math.ceil(((self.high - self.low) / 2 / max(abs(self.gain), 0.1)) ** 2))
        if times > _MOST_TIMES:
            return (
                f"more trainings would not settle a difference of {abs(self.gain):.1f} points, so any of these "
                f"networks serves as well; nasfast export --out {out} writes the files of the best one"
            )
        return (
            f"nasfast retrain --out {out} --resume --retrain.random_architectures {times * self.peers} --retrain.seeds "
            f"{times * self.runs} trains {times} times as many networks in {times} times the time, which would "
            f"settle a difference of {abs(self.gain):.1f} points"
        )

    def sentence(self, subject: str, rival: str | None = None) -> str:
        """The difference, its interval, and what the interval covers.

        Args:
            subject: what was trained, such as "Retrained, it".
            rival: an architecture that was trained with several seeds; None for random architectures of equal cost.
        """
        single = rival is None and self.peers == 1
        mean = "one random architecture" if single else f"the mean of {self.peers} random architectures"
        side = "above" if self.gain > 0 else "below" if self.gain < 0 else "away from"
        parts = [counted(self.images, "image")]
        if self.runs > 1:
            parts.append("the seeds of the answer")
        if self.peers > 1:
            parts.append("the random architectures" if rival is None else "the seeds of the baseline")
        covers = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
        text = (
            f"{subject} is {abs(self.gain):.2f} percentage points {side} {rival or f'{mean} of equal cost'} "
            f"(95 % interval {self.low:+.2f} to {self.high:+.2f}, over {covers})"
        )
        if not self.significant:
            return f"{text}: the difference is not significant."
        return f"{text}. Other random architectures may be better or worse." if single else f"{text}."


def advise(comparison: Comparison, retrained: Mapping[str, Mapping[str, Any]], out: object, classes: int) -> str:
    """What to do next with the retrained networks of a run; first of all, with those that have learnt nothing."""
    names = [
        name for name, result in retrained.items() if top1_interval(result["top1"], result["images"])[0] <= 1 / classes
    ]
    if not names:
        return comparison.next_step(out)
    epochs = max(result["epochs"] for result in retrained.values())
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} at chance, so there is nothing to compare yet; "
        f"nasfast retrain --out {out} --resume --retrain.train.epochs {2 * epochs} trains for twice as long"
    )


def compare(
    best: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], repeats: Sequence[Mapping[str, Any]] = ()
) -> Comparison | None:
    """Compare the best network with random ones on the images on which all of them were evaluated (`compare_runs`).

    All are `result.json` of retrained networks; `repeats` are of the same architecture trained with other seeds. Those
    of another cost or training (`same_terms`) are left out, and without a peer there is no comparison. If the best one
    was trained once, the interval does not have the scatter of its own training.
    """
    peers = [peer for peer in peers if same_terms(best, peer)]
    return compare_runs([best, *(again for again in repeats if same_terms(best, again))], peers) if peers else None


def compare_runs(group: Sequence[Mapping[str, Any]], rivals: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare two groups of retrained networks on the images on which all of them were evaluated.

    Let d_i = (share of `group` that is right on image i) - (share of `rivals`), N the number of images, and s_k the
    standard deviation of the accuracies of the n_k networks of group k. The interval is

        mean d +- sqrt((z std(d) / sqrt(N + 2))^2 + sum_k (t_k s_k / sqrt(n_k))^2),

    where z and t_k are the 97.5 % quantiles of the normal distribution and of Student's with n_k - 1 degrees of
    freedom. The first term comes from the images; they are paired, so an image that is hard for all adds nothing. Its
    deviation is that of N + 2 images, with half an image more for either side and one more on which they agree (Agresti
    and Min 2005): that two networks agree on few images does not show that they always do. The other terms come from
    the seeds and the architectures of a group, and are unknown, and left out, for a group of one.

    Args:
        group, rivals: `result.json` of each network; all were evaluated on the same images.
    """
    from scipy import stats  # takes half a second

    right = [
        np.array([answers_from_hex(result["correct"], result["images"]) for result in results], dtype=float)
        for results in (group, rivals)
    ]
    difference = right[0].mean(axis=0) - right[1].mean(axis=0)
    images = len(difference)
    square, mean = (float(np.square(difference).sum()) + 1) / (images + 2), float(difference.sum()) / (images + 2)
    terms = [stats.norm.ppf(_TWO_SIDED) * math.sqrt((square - mean**2) / (images + 2))]
    for answers in right:
        if (n := len(answers)) > 1:
            scatter = np.std(answers.mean(axis=1), ddof=1)
            terms.append(stats.t.ppf(_TWO_SIDED, n - 1) * scatter / math.sqrt(n))
    gain, half = 100 * float(difference.mean()), 100 * math.hypot(*terms)
    return Comparison(gain, gain - half, gain + half, len(rivals), images, len(group))


class Top1(NamedTuple):
    """The top-1 of an architecture, from 0 to 1: the mean of its `seeds` trainings.

    `low` and `high` are the range of several trainings; of one, Wilson's 95 % interval over the images.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, results: Sequence[Mapping[str, Any]]) -> Top1:
        """That of the `result.json` of each training."""
        values = [result["top1"] for result in results]
        low, high = min(values), max(values)
        if len(values) == 1:
            low, high = top1_interval(values[0], results[0]["images"])
        return cls(sum(values) / len(values), low, high, len(values))

    @property
    def spread(self) -> str:
        """What `low` and `high` are."""
        return "95 % interval" if self.seeds == 1 else f"mean of {self.seeds} seeds,"


def trainings(name: str, retrained: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results of the architecture of `name`: its own first, and those of other seeds in equal training."""
    first = retrained[name]
    return [first, *(again for again in other_seeds(name, retrained) if same_terms(first, again))]


def same_terms(best: Mapping[str, Any], peer: Mapping[str, Any]) -> bool:
    """Whether a result can be compared with another: equal cost, equal epochs, evaluated on the same images."""
    near = abs(peer["macs"] - best["macs"]) <= EQUAL_COST_TOLERANCE * best["macs"]
    # the number of ranks decides the order of images
    return near and all(peer[key] == best[key] for key in ("epochs", "images", "ranks"))


def other_seeds(name: str, retrained: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The results of the same architecture as that of `name`, trained with other seeds: `NAME-seed-1`, ..."""
    arch = list(retrained[name]["arch"])
    return [
        result
        for other, result in retrained.items()
        if other.startswith(f"{name}-seed-") and list(result["arch"]) == arch
    ]


def is_peer(name: str) -> bool:
    """Whether a retrained network of this name is a random architecture: `random`, `random-2`, ..."""
    return name == "random" or name.startswith("random-")


def score_verdict(run_dir: str | Path) -> str:
    """What is known about the score that the search maximised: what refined it, or the verdict of `nasfast rank`."""
    refinement = _read_value(str, Path(run_dir) / REFINED_FILE, "meta", "refinement")
    if refinement is not None:
        return f"The proof is about the score only. {refinement}"
    verdict = _read_value(str, Path(run_dir) / "rank.json", "verdict")
    if verdict is not None:
        return f"The proof is about the score only. How well the score ranks trained accuracies: {verdict}"
    text = (
        "The proof is about the score only. How well the score ranks trained accuracies was not measured in this "
        "run (nasfast rank measures it, docs/ranking.md says what to expect)."
    )
    fit = _read_value(float, Path(run_dir) / TABLE_FILE, "meta", "cross_validated_tau")
    if fit is not None and fit < _NOISE:
        text += (
            f" Much of this score is noise: its table predicts the scores of paths that it was not fitted to with a "
            f"tau of {fit:.2f}. Train longer, or score more paths."
        )
    return text


def _read_value(kind: type[Value], path: Path, *keys: str) -> Value | None:
    """A value in a JSON file, or None if the file or the value is missing, damaged, or of another type."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            value = value[key]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return value if isinstance(value, kind) else None


def training_top1(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """The supernet's last training accuracy, from 0 to 1, in lines of metrics.jsonl; None if there is none yet."""
    accuracies = [m["top1"] for m in metrics if m["stage"] == "supernet" and m.get("top1") is not None]
    return accuracies[-1] if accuracies else None


def at_chance(top1: float, num_classes: int) -> bool:
    """Whether an accuracy, from 0 to 1, is about chance: at most 0.02, or half of it up to 0.05, above 1 / classes."""
    chance = 1 / num_classes
    return top1 <= chance + max(_CHANCE_MARGIN, min(chance / 2, _LARGEST_MARGIN))
