"""Runs the tests of the emulated CUDA kernels with the interpreter in its place.

    PYTHONPATH=tests python -m ptx [-k EXPRESSION] [OTHER ARGUMENTS OF PYTEST]

Tests of what only the emulation has, such as the order of threads, pass without meaning anything.
"""

import sys
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest

FILES = [f"tests/ops/test_cuda_{name}.py" for name in ("boundary", "chain")]
# tests of tracing and not of kernels: they fail inside torch while the operators are replaced
TRACED = ["tests/ops/test_cuda_chain.py::test_operators_pass_opcheck"]


class _Interpreter:
    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        from nasfast import _emulation

        from .chains import interpreted
        from .kernels import record_for

        def set_emulation(
            multiprocessors: int = 2, backwards: bool = False, block_order: int = 0, shared_memory: int = 99
        ) -> None:
            record_for(multiprocessors, shared_memory * 1024)

        with interpreted(2, 99, may_be_new=True), patch.object(_emulation, "set_emulation", set_emulation):
            return (yield)


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    chosen = [*(str(root / name) for name in FILES), *(f"--deselect={name}" for name in TRACED)]
    sys.exit(pytest.main([f"--rootdir={root}", *chosen, *sys.argv[1:]], [_Interpreter()]))
