"""The CPU kernels of every instruction set against float64.

The other tests here run on the best instruction set of this processor. This one runs each of the others in a process of
its own, because a process keeps the instruction set that it chose first.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from nasfast.ops import _native

OTHERS = []
if _native.extension and __name__ != "__main__":
    OTHERS = [isa for isa in _native.extension.usable_isas() if isa != _native.extension.isa()]


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Run `python ...` where no instruction set is usable until the program names another one."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "NASFAST_ISA": "mmx", "PYTHONPATH": path}
    # not in the root folder, whose nasfast may not be the one under test
    folder = Path(__file__).parent
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("isa", OTHERS)
def test_every_instruction_set_matches_float64(isa):
    """One that this processor lacks is refused by name, and chooses nothing."""
    result = start(__file__, str(_native.extension.path), isa)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("NASFAST_ISA: 'mmx' is not usable here; valid values are baseline")


def main(library: str, isa: str) -> None:
    """Check every operator; the last line that is printed says which case failed."""
    from kernel_cases import IMAGE_OPERATORS, bn_act, chain, pool_3x3

    assert str(_native.extension.path) == library, _native.extension.path
    try:
        _native.extension.isa()
    except RuntimeError as error:
        print(error)
    os.environ["NASFAST_ISA"] = isa
    assert _native.extension.isa() == isa
    _native.extension.poison_pool(True)
    torch.set_num_threads(1)

    def each(operator: str, cases: Iterable, check: Callable[[Any], None]) -> None:
        for case in cases:
            print(operator, case)
            check(case)

    acts = zip(bn_act.CASES, cycle(bn_act.ACTS), strict=False)
    each("bn_act", acts, lambda c: bn_act.check_case(*c, True, True, "cpu"))
    for module in [import_module(f"kernel_cases.{name}") for name in IMAGE_OPERATORS]:
        each(module.__name__, module.CASES, partial(module.check_case, backend="cpu"))
    each("pool_3x3, special values, stride", (1, 2), pool_3x3.check_special_values)
    chains = chain.POINTWISE + chain.DEPTHWISE + chain.CHAINS + chain.PLANS
    each("chain", (case for case in chains if case.pixels < 10**4), chain.check_case)
    each("chain in bfloat16", chain.BFLOAT16_CASES[::4], chain.check_bfloat16)


if __name__ == "__main__":
    main(*sys.argv[1:])
