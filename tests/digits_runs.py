"""Settings of runs on the digits that take seconds, and what a repeated one must reproduce."""

from __future__ import annotations

from pathlib import Path

import yaml
from tiny import tiny_space

import nasfast.train.loop as loop
from nasfast.train.log import read_metrics

LIMIT = 70_000  # below the most expensive architecture; within it, other architectures have the cost of the best one

SETTINGS = {
    "data": {"source": "digits", "batch_size": 128, "workers": 0},
    "train": {"epochs": 2, "lr": 0.1, "log_every": 5, "checkpoint_every": 4},
    "score": {"paths": 60},  # of 12 candidates; the default takes seconds
    "search": {"max_macs": LIMIT, "top_k": 3},
    "retrain": {"top_k": 1, "random_architectures": 1, "train": {"epochs": 1, "log_every": 5, "checkpoint_every": 4}},
    "threads": 1,
}


def write_config(folder: Path, **changes) -> Path:
    """A config file with a tiny space of its own beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_space(num_classes=10).save(folder / "tiny.yaml")
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**SETTINGS, "space": {"name": str(folder / "tiny.yaml")}, **changes}))
    return path


def contents(run_dir: Path) -> dict[str, object]:
    """Everything that a repeated run must reproduce."""
    names = ["space.yaml", "indicators.json", "archs.json"]
    names += [f"retrain/{n}/{f}" for n in ("best", "random") for f in ("model.safetensors", "config.json")]
    result = {name: (run_dir / name).read_bytes() for name in names}
    result |= {str(p.name): p.read_bytes() for p in (run_dir / "checkpoints").iterdir()}
    result["metrics"] = [{k: v for k, v in m.items() if k != "images_per_s"} for m in read_metrics(run_dir)]
    return result


def interrupt(monkeypatch, at: int) -> None:
    """Press Ctrl-C in the middle of step `at`, counted over all stages."""
    step, count = loop.update, 0

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "update", counted)


EVOLUTION = {
    "method": "evolution",
    "population": 4,
    "generations": 2,
    "parents": 2,
    "crossovers": 1,
    "mutations": 1,
    "max_macs": LIMIT,
    "top_k": 2,
}
