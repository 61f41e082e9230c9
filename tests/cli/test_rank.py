"""`nasfast rank` on cells, and its flags; `tests/indicators/test_networks.py` ranks untrained networks with it."""

from __future__ import annotations

import re

import pytest

from nasfast.cli.main import main


def test_rank_of_cells_from_csv(tmp_path, capsys):
    """Names of operations, a column by name, a space of cells; the score is the accuracy itself."""
    ops = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3")
    cells = [f"|{a}~0|+|none~0|{b}~1|+|none~0|none~1|{c}~2|" for a in ops for b in ops for c in ops]
    rows = [f"{cell},1,{i}" for i, cell in enumerate(cells)]
    (tmp_path / "table.csv").write_text("\n".join(["arch,accuracy,late", *rows]))
    (tmp_path / "scores.csv").write_text("\n".join(["arch,score", *(f"{c},{i}" for i, c in enumerate(cells))]))
    argv = ["rank", f"--table={tmp_path}/table.csv", "--column=late", "--resamples=20"]
    argv += [f"--predictor={tmp_path}/scores.csv", "--space"]
    assert main([*argv, "nas_bench_201"]) == 0
    out = capsys.readouterr().out
    assert "64 architectures" in out
    taus = dict(re.findall(r"^(\w[\w ]*?) +([+-]\d\.\d+|undefined)(?: \[|  )", out, re.MULTILINE))
    assert taus["predictor"] == "+1.000" and taus["fewer avg_pool_3x3"] == "undefined"
    assert float(taus["fewer none"]) > 0 and float(taus["more conv_3x3"]) > 0
    assert main([*argv, "nas_bench_macro"]) == 1
    assert "64 of 64 architectures are not of space 'nas_bench_macro'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--table t.json", "give one of --out RUN, --predictor FILE, and --images FOLDER"),
        ("--table t.json --out a --predictor b", "give one of --out RUN"),
        ("--table t.json --out a --images b --score naswot", "give one of --out RUN"),
        ("--table t.json --out a --sample 5", "--sample needs --score or --images"),
        ("--table t.json --predictor b --score naswot", "--score needs --out or --images"),
        ("--table t.json --out a --score naswot --cells 5", "--cells, --channels and --batch need --images"),
        ("--table t.json --out a --batch 8", "--cells, --channels and --batch need --images"),
        ("--table t.json --out a --space darts", "--space needs --predictor or --images"),
        ("--table t.json --out a --interval 0.2", "--epochs and --interval need --train"),
        ("--table t.json --out a --resamples 5", "--resamples must be at least 10, got 5"),
        ("--table t.json --images b --score naswot --cells 0", "--cells must be at least 1, got 0"),
        ("--train 10", "--train needs --out RUN"),
        ("--out o", "give either --table FILE or --train N"),
        ("--train 10 --table t.json --out o", "give either --table FILE or --train N"),
        ("--table t.json --out o --epochs 2", "--epochs and --interval need --train"),
        ("--train 10 --out o --epochs 0", "--epochs must be at least 1, got 0"),
        ("--train 10 --out o --interval 0", "--interval must be positive and finite, got 0.0"),
        ("--train 10 --out o --seed 1", "takes neither --sample nor --column nor --seed"),
        ("--benchmark a=b --images c --dry_run", "--max_hours and --dry_run are about --train N"),
        ("--benchmark a=b --images c --workers 2", "--executor, --workers, --attempts"),
        ("--benchmark a=b --images c --resamples 5", "--resamples must be at least 10, got 5"),
        ("--benchmark a=b --images c --batch 0", "--batch must be at least 1, got 0"),
    ],
)
def test_flags_of_rank_that_contradict_each_other(capsys, flags, message):
    assert main(["rank", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_scores_is_told_what_to_do(tmp_path, capsys):
    assert main(["rank", "--out", str(tmp_path), "--table", "t.json"]) == 1
    remedy = f"indicators.json is missing: run `nasfast score --out {tmp_path}` first\n"
    assert capsys.readouterr().err == f"nasfast rank: {tmp_path}/{remedy}"
