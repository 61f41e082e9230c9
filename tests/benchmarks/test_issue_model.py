"""The model of a GPU step: what it counts in kernels that can be counted by hand, and what a real step launches."""

import json
import struct
from pathlib import Path

import pytest
from tiny import tiny_space

from nasfast.spaces import Block, Stage

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STEP = RESULTS / "issue_model.json"
# what a step of the default workload may have
MOST_LAUNCHES = 300
pytest.importorskip("triton")
pytestmark = pytest.mark.aot


@pytest.fixture(scope="session")
def run(program):
    """Runs a program that compiles for a GPU, with `cache` as Triton's folder of kernels; returns what it prints."""
    return lambda *command, cache: program(*command, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache))


# ---- kernels that can be counted by hand


@pytest.fixture(scope="module")
def small(run, tmp_path_factory):
    """What the model says of the kernels in small_kernels.py, by name and architecture."""
    return json.loads(run(str(Path(__file__).parent / "small_kernels.py"), cache=tmp_path_factory.mktemp("cache")))


ARCHS = ("86", "90")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("n", "m"), [(0, 3), (1, 1), (5, 1), (3, 7), (16, 9)])
def test_nested_loops_run_as_often_as_their_bounds_say(small, arch, n, m):
    walk = small[f"nested {n} {m}"][arch]["ordinary"]
    assert (walk["loads"], walk["stores"]) == (n * m, 1)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_persistent_loop_runs_as_often_as_its_program_has_tiles(small, arch, index):
    walk = small[f"persistent {index}"][arch]["ordinary"]
    assert walk["loads"] == walk["stores"] == len(range(index, 11, 3))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("parts", [5, 37])
def test_only_the_last_program_to_arrive_adds_the_parts(small, arch, parts):
    found = small[f"last {parts}"][arch]
    assert (found["ordinary"]["loads"], found["ordinary"]["stores"], found["ordinary"]["atomics"]) == (1, 1, 1)
    assert (found["last"]["loads"], found["last"]["stores"], found["last"]["atomics"]) == (1 + parts, 2, 1)
    assert found["last"]["cycles"] > found["ordinary"]["cycles"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n", [0, 7, 250])
def test_unrolled_loops_count_what_they_do(small, arch, n):
    # two elements per thread
    assert small[f"fma {n}"][arch]["ordinary"]["fma"] == 2 * n


@pytest.mark.parametrize("arch", ARCHS)
def test_loads_that_depend_on_each_other_wait_for_memory_each_time(small, arch):
    short, long = (small[f"chase {n}"][arch]["ordinary"] for n in (10, 30))
    assert long["loads"] - short["loads"] == 20
    assert 600 <= (long["cycles"] - short["cycles"]) / 20 < 640


@pytest.mark.parametrize("divisor", [1, 3, 7, 12, 320])
def test_a_quotient_by_a_float_reciprocal_is_known(divisor):
    """static_cast<int>((a + 0.5f) * inverse), with the inverse among the arguments, as compilers write it."""
    from benchmarks.gpu_model.integers import carry_out
    from benchmarks.gpu_model.registers import Registers
    from benchmarks.gpu_model.sass import Instruction

    at = 0x160
    inverse = struct.unpack("<I", struct.pack("<f", 1 / divisor))[0]
    lines = [
        ("I2FP.F32.S32", ("R1", "R0")),
        ("FADD", ("R1", "R1", "0.5")),
        ("FMUL", ("R2", "R1", f"c[0x0][{at:#x}]")),
        ("F2I.TRUNC.NTZ", ("R3", "R2")),
        ("FFMA", ("R4", "-R1", "2", "R1")),
        ("FADD", ("R5", "R2", "R9")),
        ("F2F.F32.F64", ("R6", "R10")),
    ]
    code = [Instruction(None, opcode, operands, None, 1, 7, 7, 0) for opcode, operands in lines]
    for a in (0, 1, divisor - 1, divisor, 5 * divisor + 1, 2000):
        registers = Registers({at: inverse}, (0, 0, 0))
        registers.put("R0", a)
        registers.put("R7", 1)
        for instruction in code:
            carry_out(registers, instruction, sure=True)
        assert registers.get("R3") == a // divisor
        assert struct.unpack("<f", struct.pack("<I", registers.get("R4")))[0] == -(a + 0.5)
        assert registers.get("R5") is None  # R9 is unknown
        assert registers.get("R6") is None and registers.get("R7") == 1  # the double has two registers, its float one


@pytest.mark.parametrize("arch", ARCHS)
def test_a_loop_that_depends_on_memory_is_refused(small, arch):
    assert "depends on memory" in small["while"][arch]["error"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("ld", "accesses"), [(1024, {"16": 2}), (1040, {"16": 2}), (1048, {"2": 16})])
def test_accesses_are_wide_where_triton_knows_a_multiple_of_16(small, arch, ld, accesses):
    # 8 elements of 16 bits per thread, loaded and stored
    assert small[f"copy {ld}"][arch]["ordinary"]["accesses"] == accesses


def test_arguments_are_specialised_as_triton_does_it(small):
    assert small["copy 1024"]["divisible"] == ["ld", "out", "x"]
    # `shift` is 16 too, and declared not to be specialised
    assert small["copy 1048"]["divisible"] == ["out", "x"]
    assert small["copy 1024"]["signature"]["shift"] == "i32"
    # 1 becomes a constant
    assert small["nested 1 1"]["signature"]["n"] == "constexpr"
    assert small["nested 3 7"]["signature"] == {
        "x": "*fp32",
        "out": "*fp32",
        "n": "i32",
        "m": "i32",
        "BLOCK": "constexpr",
    }


# ---- a real step


def _rows(path: Path) -> tuple[dict, dict[int, dict]]:
    """Launches by part of the step, and the table of kernels by architecture."""
    rows = json.loads(path.read_text())["rows"]
    return rows[0]["launches"], {row["arch"]: row["kernels"] for row in rows if "arch" in row}


def test_a_step_launches_no_more_than_the_results_say(run, tmp_path):
    out = tmp_path / "launches.json"
    run("-m", "benchmarks.gpu_model", "--arch", "--out", str(out), cache=tmp_path / "cache")
    found, expected = _rows(out)[0], _rows(STEP)[0]
    # the norm of the gradients and the update; PyTorch copies the addresses of the tensors
    assert found["optimizer"] == {"triton": 2, "cuda": 0, "pytorch": 1} and found["engine"]["triton"] == 0
    assert found["forward"]["triton"] > 0 and found["backward"]["triton"] > 0
    assert sum(sum(counts.values()) for counts in found.values()) <= MOST_LAUNCHES
    for phase, counts in expected.items():
        assert found[phase]["triton"] <= counts["triton"]
        assert found[phase]["pytorch"] <= counts["pytorch"]


@pytest.fixture(scope="module")
def small_space(tmp_path_factory):
    """A file with a space of two layers, one of them a reduction, because every kernel of a step is compiled."""
    path = tmp_path_factory.mktemp("space") / "small.yaml"
    tiny_space(stages=(Stage(24, 2, 2, (Block("mbconv", 3, 2),)),), resolution=32).save(path)
    return str(path)


def test_a_cache_made_here_serves_the_just_in_time_path(run, small_space, tmp_path):
    out = tmp_path / "host.json"
    command = ["--space", small_space, "--cache", str(tmp_path / "kernels"), "--jobs", "1", "--out", str(out)]
    run("-m", "benchmarks.gpu_model.host_cost", *command, cache=tmp_path / "unused")
    (row,) = json.loads(out.read_text())["rows"]
    assert row["found"] == row["specializations"] > 10 and row["compiled_again"] == 0
    assert row["launches"] > 0 and 0 < row["launch_us"] < row["step_us"]


def test_the_host_of_a_step_replays_graphs(run, small_space, tmp_path):
    out = tmp_path / "host.json"
    command = ["--space", small_space, "--engine", "graphs", "--out", str(out)]
    run("-m", "benchmarks.gpu_model.host_cost", *command, cache=tmp_path / "unused")
    (row,) = json.loads(out.read_text())["rows"]
    # forward and backward of the stem and of two layers, and the head; the update is two launches besides
    assert (row["replays"], row["launches"]) == (7, 2) and row["step_us"] > 0 < row["update_us"]


# prints the key that each named kernel has in Triton's cache, computed in this order
_KEYS = """
import sys
from importlib import import_module
from benchmarks.gpu_model import compilable
for name in sys.argv[1:]:
    module, kernel = name.split(".")
    print(name, getattr(import_module(f"nasfast._triton.{module}"), kernel).cache_key)
"""


def test_the_key_of_a_kernel_does_not_depend_on_which_kernel_comes_first(run, tmp_path):
    names = [
        "bn.bn_statistics_kernel",
        "pointwise.pointwise_forward_kernel",
        "depthwise.depthwise_backward_kernel",
        "pointwise.pointwise_backward_kernel",
    ]
    first, last = (run("-c", _KEYS, *order, cache=tmp_path).splitlines() for order in (names, names[::-1]))
    assert len(set(first)) == len(names) and sorted(first) == sorted(last)


def test_the_program_models_the_launches_of_a_kernel(run, small_space, tmp_path):
    out, kernel = tmp_path / "model.json", "bn_act_kernel"
    command = ["--space", small_space, "--batch", "4", "--arch", "90", "--kernel", kernel, "--jobs", "1"]
    run("-m", "benchmarks.gpu_model", *command, "--out", str(out), cache=tmp_path / "unused")
    kernels = _rows(out)[1][90]
    assert kernels[kernel] == kernels["all"] and kernels["all"]["launches"] > 0
    assert 0 < kernels["all"]["memory"] < kernels["all"]["largest"]
