"""What every kind of space offers, over all built-in spaces, and the one reader of their names and files."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from nasfast.config import ConfigError
from nasfast.research.cells.space import darts_space
from nasfast.spaces import (
    BUILDERS,
    ArchError,
    ArchSpace,
    Cost,
    SearchSpace,
    arch_from_json,
    arch_to_json,
    digits_mini,
    get_space,
    list_spaces,
    named_space,
    read_space,
)

CELLS = ("darts", "nas_bench_201", "transnas_micro", "choice_blocks")


@pytest.fixture(params=sorted(BUILDERS))
def space(request) -> ArchSpace:
    return named_space(request.param)


def test_the_registry_names_every_space_by_its_own_name():
    assert {name: build().name for name, build in BUILDERS.items()} == {name: name for name in list_spaces()}
    assert tuple(name for name, build in BUILDERS.items() if not build().LAYERWISE) == CELLS


def test_random_architectures_belong_to_the_space_and_vary(space):
    rng = np.random.default_rng(0)
    archs = [space.random(rng) for _ in range(60)]
    assert all(space.check(arch) == arch and len(arch) == len(space) for arch in archs)
    seen = [set(values) for values in zip(*archs, strict=True)]
    assert all(values <= set(options) for values, options in zip(seen, space.options, strict=True))
    assert all(len(values) > 1 for values, options in zip(seen, space.options, strict=True) if len(options) > 1)
    again = np.random.default_rng(0)
    assert [space.random(again) for _ in range(60)] == archs


def test_a_cost_is_the_fixed_part_and_that_of_every_choice(space):
    arch = space.random(np.random.default_rng(1))
    macs, params = space.fixed_cost.macs, space.fixed_cost.params
    for operators, value in zip(space.operators, arch, strict=True):
        macs, params = macs + operators[value].cost.macs, params + operators[value].cost.params
    assert space.cost(arch) == Cost(macs, params)


def test_tables_have_a_row_per_choice_and_a_column_per_candidate(space):
    assert len(space.rows) == len(space) and len(set(space.rows)) == len(space)
    assert len(space.columns) == len({value for values in space.options for value in values})


def test_written_forms_are_read_again(space, tmp_path):
    arch = space.random(np.random.default_rng(2))
    space.save(tmp_path / "space.yaml")
    again = read_space(tmp_path / "space.yaml")
    assert type(again) is type(space) and again == space and again.fingerprint == space.fingerprint
    (tmp_path / "space.json").write_text(json.dumps(space.to_dict()))
    assert read_space(tmp_path / "space.json") == space
    assert space.parse(" ".join(map(str, arch))) == arch
    assert arch_from_json(arch_to_json(arch, space), again) == arch
    assert len(space.describe(arch)) == len(space)


def test_an_error_names_the_choice_its_space_and_the_legal_values(space):
    arch = list(space.random(np.random.default_rng(3)))
    arch[1] = 99
    with pytest.raises(ArchError) as error:
        space.check(arch)
    text = str(error.value)
    assert text.startswith(f"{space.place(1)} of space {space.name!r}: choice 99 is not one of ")
    for value in space.options[1]:
        assert f"{value} ({space.label(1, value)})" in text


def test_the_number_of_architectures_by_counting():
    small = [
        digits_mini().replace(stages=digits_mini().stages[:1]),
        darts_space().replace(cell=darts_space().cell.restricted(0, 2, ("none",)), reductions=()),
    ]
    assert small[0].cardinality == len(list(itertools.product(*small[0].options))) == 6**3
    assert small[1].cardinality == 8**13


def test_names_and_files_of_both_kinds(tmp_path):
    assert named_space("darts", cells=3, num_classes=7) == darts_space(cells=3, num_classes=7)
    darts_space().save(tmp_path / "cells.yaml")
    assert named_space(str(tmp_path / "cells.yaml"), num_classes=3) == darts_space(num_classes=3)
    with pytest.raises(ConfigError, match="unknown space 'dart'.*did you mean 'darts'"):
        named_space("dart")


@pytest.mark.parametrize(("build", "key", "given"), [(darts_space, "cell", "cel"), (digits_mini, "stages", "stage")])
def test_a_misspelt_key_of_a_space_is_named_with_the_nearest(tmp_path, build, key, given):
    path = tmp_path / "mine.yaml"
    build().save(path)
    path.write_text(path.read_text().replace(f"\n{key}:", f"\n{given}:"))
    for read in (read_space, named_space, get_space):
        with pytest.raises(ConfigError) as error:
            read(str(path))
        assert str(error.value).startswith(f"{path}: unknown config key {given!r}; did you mean {key!r}")


def test_where_layers_are_needed_a_space_of_cells_is_refused(tmp_path):
    darts_space().save(tmp_path / "cells.yaml")
    for name in ("darts", str(tmp_path / "cells.yaml")):
        with pytest.raises(ConfigError, match="is a space of cells, and this needs a layer-wise one: mobilenet_v2, .*"):
            get_space(name)
    assert isinstance(get_space("digits_mini"), SearchSpace)


def test_every_built_in_space_is_made_without_torch():
    code = (
        "import sys, nasfast.spaces as s\n"
        "import numpy as np\n"
        "for space in map(s.named_space, s.BUILDERS):\n"
        "    space.cost(space.random(np.random.default_rng(0)))\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=120).returncode == 0
