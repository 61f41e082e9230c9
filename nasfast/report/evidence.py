"""What a run's results prove: best against random architectures, and what is known of the score. No torch.

A difference is claimed only where its interval excludes 0, and "highest score" stands beside what the score is worth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from nasfast.search.sampling import EQUAL_COST_TOLERANCE

PROVEN = "proven: no other within the limits has a higher score"
"""Of the first architecture that an exact search finds."""

PROVEN_NEXT = "proven: only those above have a higher score"

_TWO_SIDED = 0.975


@dataclass(frozen=True)
class Comparison:
    """The best architecture against random ones of equal cost, on the same images.

    Attributes:
        gain: top-1 of the best minus the mean top-1 of the others, in percentage points.
        low, high: its 95 % interval.
        peers: number of random architectures.
        images: number of images.
    """

    gain: float
    low: float
    high: float
    peers: int
    images: int

    @property
    def told(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0

    @property
    def sentence(self) -> str:
        """What may be said: the difference, its interval and what that covers."""
        peers = "one random architecture" if self.peers == 1 else f"the mean of {self.peers} random architectures"
        where = "above" if self.gain > 0 else "below" if self.gain < 0 else "away from"
        covers = f"over {self.images:,} images" + (" and the random architectures" if self.peers > 1 else "")
        text = (
            f"Retrained, it is {abs(self.gain):.2f} percentage points {where} {peers} of equal cost "
            f"(95 % interval {self.low:+.2f} to {self.high:+.2f}, {covers})"
        )
        if not self.told:
            return f"{text}: no difference can be told."
        if self.peers == 1:
            return (
                f"{text}. That is a difference between these two networks; others of that cost may do better or worse: "
                "retrain.random_architectures sets how many are tried."
            )
        return f"{text}: a difference that neither the images nor the choice of random architectures explains."


def compare(best: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> Comparison | None:
    """Compare retrained networks on the images that all of them were judged by.

    With d_i = (best right on image i) - (share of the m others that are right), N images, and s the standard deviation
    of the others' accuracies, the interval is

        mean d +- sqrt((z std(d) / sqrt(N))^2 + (t s / sqrt(m))^2),

    z and t the 97.5 % quantiles of the normal distribution and of Student's with m - 1 degrees of freedom. The first
    part is of the images, paired, so an image that is hard for all adds nothing; the second is of the architectures and
    of their training. With m = 1 only the first can be known. The best one was trained once: how much its own training
    scatters is in neither.

    Args:
        best: `result.json` of a retrained network.
        peers: those of random architectures; the ones of another cost or training (`same_terms`) are left out.

    Returns:
        None if no peer is comparable.
    """
    peers = [peer for peer in peers if same_terms(best, peer)]
    if not peers:
        return None
    right = [_right(form) for form in (best, *peers)]
    difference = right[0] - np.mean(right[1:], axis=0)
    images, m = len(difference), len(peers)
    of_images = stats.norm.ppf(_TWO_SIDED) * difference.std(ddof=1) / math.sqrt(images) if images > 1 else math.inf
    of_archs = 0.0
    if m > 1:
        scatter = np.std([hits.mean() for hits in right[1:]], ddof=1)
        of_archs = stats.t.ppf(_TWO_SIDED, m - 1) * scatter / math.sqrt(m)
    gain, half = 100 * float(difference.mean()), 100 * math.hypot(of_images, of_archs)
    return Comparison(gain, gain - half, gain + half, m, images)


def same_terms(best: Mapping[str, Any], peer: Mapping[str, Any]) -> bool:
    """Whether a result is a baseline of another: equal cost, trained as long, judged on the same images."""
    near = abs(peer["macs"] - best["macs"]) <= EQUAL_COST_TOLERANCE * best["macs"]
    # results of earlier versions have no record of single images; ranks decide their order
    recorded = bool(best.get("correct")) and bool(peer.get("correct"))
    return near and recorded and all(peer[key] == best[key] for key in ("epochs", "images", "ranks"))


def _right(form: Mapping[str, Any]) -> np.ndarray:
    """(images,) 1 where the network is right, 0 where not."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(form["correct"]), dtype=np.uint8), count=form["images"])
    return bits.astype(np.float64)


def is_peer(name: str) -> bool:
    """Whether a retrained network of this name is a random architecture: `random`, `random-2`, ..."""
    return name == "random" or name.startswith("random-")


def worth_of_score(run_dir: str | Path) -> str:
    """What is known of the score that the search maximised: the verdict of `nasfast rank`, where it ran."""
    path = Path(run_dir) / "rank.json"
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))["verdict"] if path.exists() else None
    except (OSError, ValueError, LookupError, TypeError):
        verdict = None
    if not isinstance(verdict, str):
        return (
            "The proof is of the score alone: how well it ranks trained accuracies was not measured in this run "
            "(nasfast rank measures it, docs/ranking.md says what to expect)."
        )
    return f"The proof is of the score alone. How well the score ranks trained accuracies: {verdict}"
