"""Files of accuracies and scores: every form, and what is said about one that cannot be used."""

from __future__ import annotations

import json

import pytest

from nasfast.indicators.accuracies import AccuracyError, read_accuracies, read_scores
from nasfast.research.cells.space import darts_space, nas_bench_201_space
from nasfast.spaces import ArchError, format_arch, nas_bench_macro

SPACE = nas_bench_macro()
ARCHS = ["".join(str((i // 3**k) % 3) for k in range(8)) for i in range(0, 600, 50)]
"""Twelve, as digits."""


def write(path, form):
    path.write_text(form if isinstance(form, str) else json.dumps(form), encoding="utf-8")
    return path


def table(changes):
    """Twelve architectures, the first of them changed."""
    return {**{a: 70.0 + i for i, a in enumerate(ARCHS[len(changes) :])}, **changes}


def test_reads_every_published_form(tmp_path):
    entries = {
        "00000011": {"mean_acc": 67.69, "std": 0.1, "params": 1195306, "flops": 20517376},
        "00000100": {"test_acc": [70.0, 71.0]},
        "0 0 0 0 0 1 1 0": 79.5,
        "0,0,0,0,0,1,2,2": [82.0, 83.0],
    }
    read = read_accuracies(write(tmp_path / "acc.json", {**entries, **dict.fromkeys(ARCHS[1:], 1.0)}), SPACE)
    assert list(read.values())[:4] == [67.69, 70.5, 79.5, 82.5]
    assert format_arch(next(iter(read))) == "0 0 0 0 0 0 1 1"


def test_csv_says_the_same_as_json(tmp_path):
    values = {a: 70.25 + i for i, a in enumerate(ARCHS)}
    lines = [f"{a},{v},5" for a, v in list(values.items())[:6]]
    lines += [f'"{", ".join(a)}",{v},5' for a, v in list(values.items())[6:]]
    csv = write(tmp_path / "acc.csv", "\n".join(["arch,accuracy,epochs", *lines]) + "\n")
    assert read_accuracies(csv, SPACE) == read_accuracies(write(tmp_path / "acc.json", values), SPACE)
    scores = write(tmp_path / "scores.csv", "arch,score\n00000011,1\n00000100,2.5\n")
    assert list(read_scores(scores, SPACE).values()) == [1.0, 2.5]


def test_a_column_is_chosen_by_name(tmp_path):
    path = write(tmp_path / "acc.json", {a: {"mean_acc": 1.0, "cifar100-val": 30.0 + i} for i, a in enumerate(ARCHS)})
    assert list(read_accuracies(path, SPACE, column="cifar100-val").values())[:2] == [30.0, 31.0]
    with pytest.raises(AccuracyError, match="expected one of imagenet-val, got mean_acc, cifar100-val"):
        read_accuracies(path, SPACE, column="imagenet-val")


def test_cells_by_names_of_operations(tmp_path):
    space = nas_bench_201_space()
    ops = ("avg_pool_3x3", "nor_conv_3x3", "none", "skip_connect", "nor_conv_1x1")
    texts = [f"|{a}~0|+|{b}~0|none~1|+|none~0|skip_connect~1|nor_conv_3x3~2|" for a in ops for b in ops][:12]
    read = read_accuracies(write(tmp_path / "acc.json", {t: {"accuracy": 5.0} for t in texts}), space)
    assert list(read)[:3] == [(2, 2, 0, 0, 1, 4), (2, 4, 0, 0, 1, 4), (2, 0, 0, 0, 1, 4)]


def test_names_of_another_cell_are_refused():
    with pytest.raises(ArchError, match="nas_bench_201"):
        nas_bench_201_space().parse("|none~0|skip_connect~0|+|none~0|none~1|+|none~0|none~1|none~2|")
    known = r"operation 'conv_5x5~1' into node 2, .*none, skip_.*\(0, 1\), \(0, 2\), \(1, 2\)"
    text = "|none~0|+|none~0|conv_5x5~1|+|none~0|none~1|none~2|"
    with pytest.raises(ArchError, match=known):
        nas_bench_201_space().parse(text)
    with pytest.raises(ArchError, match="darts"):
        darts_space().parse(text)
    with pytest.raises(ArchError, match="operation 'none~²' into node 1"):  # a digit, and no decimal number
        nas_bench_201_space().parse("|none~²|+|none~0|none~1|+|none~0|none~1|none~2|")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON .*: give JSON such as .*, or CSV with a header such as arch,accuracy"),
        ("{}", "has no entry, not accuracies of architectures: give JSON such as"),
        (
            table({"0000001": 1.0, "00000019": 2.0}),
            "2 of 12 architectures are not of space 'nas_bench_macro'; the first, entry '0000001'.*8 values, got 7",
        ),
        (table({"00000011": {"flops": 3}}), "'00000011': no accuracy; expected one of mean_acc.*got flops"),
        (table({"00000011": []}), r"got \[\]"),
        (
            table({"00000011": 100.5, "00000100": -1, "00000111": [50, 101]}),
            "3 of 12 architectures have no accuracy from 0 to 100; the first, entry '00000011': .*got 100.5",
        ),
        (
            table({"00000011": 1, "0 0 0 0 0 0 1 1": 2, "0,0,0,0,0,0,1,1": 3}),
            "2 of 12 entries repeat an architecture; the first, '00000011' and '0 0 0 0 0 0 1 1'",
        ),
        (
            '{"00000011": 1, "00000100": 2, "00000011": 3}',
            "1 of 3 entries repeat an architecture; the first, '00000011'",
        ),
        ({a: 1.0 for a in ARCHS[:9]}, "has 9 architectures, at least 10 are needed.*train more"),
    ],
)
def test_what_a_json_file_lacks_is_named(tmp_path, content, message):
    with pytest.raises(AccuracyError, match=message):
        read_accuracies(write(tmp_path / "acc.json", content), SPACE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arch\n00000011\n", "has the header 'arch': begin it with one such as arch,accuracy"),
        ("arch,accuracy\n", "has only its header"),
        ("arch,accuracy\n00000011\n", r"line 2: expected 2 values \(arch,accuracy\)"),
        ("arch,accuracy\n00000011,high\n", "number or a list of numbers, got 'high'"),
    ],
)
def test_what_a_csv_file_lacks_is_named(tmp_path, content, message):
    with pytest.raises(AccuracyError, match=message):
        read_accuracies(write(tmp_path / "acc.csv", content), SPACE)


def test_a_table_of_a_spreadsheet_and_a_misspelt_column(tmp_path):
    """Excel's "CSV UTF-8" begins with a byte order mark."""
    space, path = nas_bench_macro(), tmp_path / "scores.csv"
    path.write_bytes(b"\xef\xbb\xbfarch,scores\r\n00000000,1.5\r\n00000001,2.5\r\n")
    assert list(read_scores(path, space, column="scores").values()) == [1.5, 2.5]
    with pytest.raises(AccuracyError, match="'00000000' has no 'score'; did you mean 'scores'"):
        read_scores(path, space)
    (tmp_path / "twice.json").write_text('{"00000000": {"score": 1, "score": 2}}')
    with pytest.raises(AccuracyError, match="the key 'score' is there twice"):
        read_scores(tmp_path / "twice.json", space)


def test_scores_that_cannot_be_read(tmp_path):
    path = tmp_path / "scores.json"
    with pytest.raises(AccuracyError, match="finite number, got None"):
        read_scores(write(path, '{"00000011": null}'), SPACE)
    with pytest.raises(AccuracyError, match="1 of 1 architectures are not of space"):
        read_scores(write(path, '{"000": 1}'), SPACE)
    with pytest.raises(AccuracyError, match="cannot read"):
        read_scores(tmp_path / "absent.json", SPACE)


@pytest.mark.parametrize("name", ["acc.json", "acc.csv"])
def test_file_that_is_not_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(AccuracyError, match=f"{name} is not {name[4:].upper()}"):
        read_accuracies(tmp_path / name, SPACE)
