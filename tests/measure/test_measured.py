"""Tables from latencies of whole networks: exact where costs add up, with a margin where they do not."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from nasfast.cli.main import main
from nasfast.config import ConfigError
from nasfast.measure.measured import fit_measured
from nasfast.research.cells.space import nas_bench_201_space
from nasfast.spaces import nas_bench_macro, read_cost_table

SPACE = nas_bench_macro()


def archs(count: int, seed: int = 0) -> list:
    rng = random.Random(seed)
    return [tuple(rng.choice(options) for options in SPACE.options) for _ in range(count)]


def additive(arch) -> float:
    return 2.0 + sum((1 + i) * v for i, v in enumerate(arch))


def test_costs_that_add_up_are_exact_and_a_search_can_read_them(tmp_path):
    found = fit_measured(SPACE, {a: additive(a) for a in archs(300)}, device="fpga", batch=1)
    assert found.content["margin"] == pytest.approx(1, abs=0.01)
    assert found.content["held_out"]["max"] < 0.02
    found.save(tmp_path / "table.json")
    table = read_cost_table(tmp_path / "table.json", SPACE)
    assert (table.device, table.batch, table.quantity, table.unit) == ("fpga", 1, "latency", "ms")
    for arch in archs(20, seed=1):
        assert table.cost(arch) == pytest.approx(additive(arch), rel=0.02)
    assert "95% of networks take at most" in table.about


def test_the_margin_covers_new_architectures():
    """Latencies with a factor that no sum knows; the share of new ones at most the sum is near 95 %."""
    rng = np.random.default_rng(0)

    def measured(count, seed):
        return {a: additive(a) * float(np.exp(rng.normal(0, 0.2))) for a in archs(count, seed)}

    form = fit_measured(SPACE, measured(400, 0)).content
    values = {(entry["layer"], entry["choice"]): entry["value"] for entry in form["entries"]}
    new = measured(2000, 1)
    share = np.mean([ms <= form["fixed"] + sum(values[pair] for pair in enumerate(a)) for a, ms in new.items()])
    assert 0.92 < share < 0.98
    assert 1.2 < form["margin"] < 1.6


def test_latencies_that_say_too_little_are_refused():
    with pytest.raises(ConfigError, match="19 latencies, at least 20 are needed"):
        fit_measured(SPACE, {a: 1.0 for a in archs(19)})
    known = {a: additive(a) for a in archs(30)}
    with pytest.raises(ConfigError, match="1 latencies are not positive, the first is 0.0 ms"):
        fit_measured(SPACE, {**known, archs(1)[0]: 0.0})
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="misses some of .* by a factor of"):
        fit_measured(SPACE, {a: float(10 ** rng.uniform(-3, 3)) for a in known})


def test_the_command_fits_a_column_of_cells(tmp_path, capsys):
    space, rng = nas_bench_201_space(), random.Random(0)
    rows = {}
    for _ in range(60):
        arch = tuple(rng.randrange(5) for _ in range(6))
        rows[" ".join(map(str, arch))] = {"pixel3": 1.0 + sum(arch), "edgegpu": 5.0}
    (tmp_path / "ms.json").write_text(json.dumps(rows))
    argv = ["latency", "--space=nas_bench_201", f"--measured={tmp_path / 'ms.json'}", f"--out={tmp_path / 't.json'}"]
    assert main([*argv, "--column=pixel3"]) == 0
    out = capsys.readouterr().out
    assert "nas_bench_201 on pixel3" in out and "error on architectures that were not fitted" in out
    form = json.loads((tmp_path / "t.json").read_text())
    assert form["device"] == "pixel3" and form["fingerprint"] == space.fingerprint and len(form["entries"]) == 30
    table = (tmp_path / "t.json").read_bytes()
    assert main([*argv, "--column=edgegpu"]) == 1
    assert "with device 'pixel3', not 'edgegpu': choose another --out" in capsys.readouterr().err
    assert (tmp_path / "t.json").read_bytes() == table
    assert main([*argv, "--column=pixel3"]) == 0
    assert main([*argv, "--rounds=3"]) == 2
    assert "--measured fits what another device measured, and takes no --rounds" in capsys.readouterr().err
    assert main(["latency", "--column=pixel3"]) == 2
    assert "--column needs --measured" in capsys.readouterr().err
