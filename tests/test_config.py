"""The base of the config dataclasses: round trips, conversions, errors that name the key."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

import pytest

from nasfast.config import ConfigBase, ConfigError, flatten, load_yaml, merge
from nasfast.settings import MACHINE, RESUMED, SUPERNET, RunConfig


@dataclass(frozen=True)
class Inner(ConfigBase):
    rate: float = 0.1
    sizes: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


@dataclass(frozen=True)
class Outer(ConfigBase):
    name: str
    mode: Literal["fast", "slow"] = "fast"
    limit: float | None = None
    flag: bool = False
    count: int = 3
    inner: Inner = field(default_factory=Inner)
    several: tuple[Inner, ...] = ()


def test_round_trip(tmp_path):
    config = Outer("x", limit=2.5, inner=Inner(sizes=()), several=(Inner(), Inner(rate=1.0)))
    config.save(tmp_path / "c.yaml")
    assert Outer.load(tmp_path / "c.yaml") == config
    assert Outer.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "text",
    [
        "epochs: 3\nlr: 0.1\nepochs: 4\n",
        "nested:\n  epochs: 3\n  epochs: 4\n",
        '{"nested": {"epochs": 3, "epochs": 4}}',
        # the parser in Python reads halves of surrogate pairs
        'name: "\\udce4"\nepochs: 3\nepochs: 4\n',
    ],
)
def test_a_key_that_is_there_twice_is_refused(text, tmp_path):
    """PyYAML and JSON keep the last value (github.com/yaml/pyyaml/issues/165)."""
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"twice.yaml is not valid YAML at line .*the key 'epochs' is there twice"):
        load_yaml(tmp_path / "twice.yaml")


def test_keys_of_an_anchor_may_be_replaced(tmp_path):
    (tmp_path / "merged.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert load_yaml(tmp_path / "merged.yaml")["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (MACHINE, "data.workers data.prefetch data.cache_dir data.max_bad_files track"),
        (
            RESUMED,
            "out device threads score search retrain recalibration_batches data.train data.val data.loader",
        ),
        (SUPERNET, "method supernet train"),
    ],
)
def test_settings_of_a_kind_are_a_part(kind, names):
    cfg = RunConfig.from_dict({"out": "x", "data": {"workers": 7, "train": "images"}, "train": {"epochs": 3}})
    rest, taken = cfg.parted(kind)
    every, chosen = flatten(cfg.to_dict()), names.split()
    assert set(flatten(taken)) == {name for name in every if any(f"{name}.".startswith(f"{one}.") for one in chosen)}
    assert set(flatten(rest)) == set(every) - set(flatten(taken))
    assert RunConfig.from_dict(merge(rest, taken)) == cfg


def test_yaml_numbers_without_a_dot_are_numbers(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("name: x\nlimit: 475e6\ncount: 4.0\ninner: {rate: 4e-5}\n")
    config = Outer.load(path)
    assert (config.limit, config.inner.rate, config.count) == (475e6, 4e-5, 4)
    assert isinstance(config.count, int)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"name": "x", "mod": "fast"}, "unknown config key 'mod'; did you mean 'mode'"),
        ({"name": "x", "inner": {"rte": 1}}, "unknown config key 'inner.rte'; did you mean 'rate'"),
        ({"name": "x", "several": [{}, {"sizs": []}]}, r"'several\[1\].sizs'"),
        ({}, "'name' is required"),
        ({"name": 3}, "'name': expected a text, got 3"),
        ({"name": "x", "mode": "medium"}, "'mode': got 'medium', allowed: 'fast', 'slow'"),
        ({"name": "x", "limit": "many"}, "'limit': expected a number, such as 0.5, 475e6 or 2.4M, got 'many'"),
        ({"name": "x", "flag": 1}, "'flag': expected true or false, got 1"),
        ({"name": "x", "count": True}, "'count': expected a whole number, got True"),
        ({"name": "x", "count": 1.5}, "'count': expected a whole number, got 1.5"),
        ({"name": "x", "inner": {"sizes": 3}}, "'inner.sizes': expected a list such as \\[3\\], got 3"),
        ({"name": "x", "inner": {"rate": -1}}, "inner: rate must not be negative"),
        ({"name": "x", "inner": 3}, "inner: expected a mapping of keys, got 3"),
        ([], "Outer: expected a mapping of keys"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_errors_name_the_key(form, message):
    with pytest.raises(ConfigError, match=message):
        Outer.from_dict(form)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot read .*absent.yaml .*give the path of a YAML file"):
        Outer.load(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="bad.yaml is not valid YAML at line 1, column 5 [^\n]*: correct the line$"):
        Outer.load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="expected a mapping at the top level, got list"):
        Outer.load(tmp_path / "list.yaml")

    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="bytes.yaml is not UTF-8 text"):
        Outer.load(tmp_path / "bytes.yaml")
    (tmp_path / "key.yaml").write_text("nam: x")
    with pytest.raises(ConfigError, match="key.yaml: unknown config key 'nam'"):
        Outer.load(tmp_path / "key.yaml")


def test_a_file_of_ours_that_was_cut_off_is_noticed_at_every_length(tmp_path):
    """A file that was cut off is often valid YAML, and defaults would replace the lost part."""
    path = tmp_path / "c.yaml"
    Outer("x", count=4, inner=Inner(rate=1.0)).save(path)
    text = path.read_text()
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(ConfigError, match="c.yaml is (truncated|empty)"):
            Outer.load(path)


def test_a_name_of_a_file_that_is_not_utf_8_comes_back(tmp_path):
    config = Outer(os.fsdecode(b"l\xe4uft"))
    config.save(tmp_path / "c.yaml")
    assert Outer.load(tmp_path / "c.yaml") == config
