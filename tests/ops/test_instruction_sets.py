"""The CPU kernels of every instruction set against float64.

The other tests here run on the best instruction set of this processor. This one runs each of the others in a process of
its own, because a process keeps the instruction set that it chose first.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nasfast.ops import _native

OTHERS = [isa for isa in _native.extension.usable_isas() if isa != _native.extension.isa()] if _native.extension else []


def start(*command: str, isa: str) -> subprocess.CompletedProcess[str]:
    """Run `python ...` where the kernels of one instruction set serve."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "NASFAST_ISA": isa, "PYTHONPATH": path}
    # not in the root folder, whose nasfast may not be the one under test
    folder = Path(__file__).parent
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("isa", OTHERS)
def test_every_instruction_set_matches_float64(isa):
    result = start(__file__, str(_native.extension.path), isa=isa)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_unusable_instruction_set_is_named(native):
    result = start("-c", "import nasfast.ops; nasfast.ops._native.extension.isa()", isa="mmx")
    assert "NASFAST_ISA: 'mmx' is not usable here; valid values are baseline" in result.stderr


def main(library: str) -> None:
    """Check every operator; the last line that is printed says which case failed."""
    from kernel_cases import bn_act, chain, depthwise_conv2d, mixed_bn, pool_3x3, squeeze_excite

    assert str(_native.extension.path) == library, _native.extension.path
    assert _native.extension.isa() == os.environ["NASFAST_ISA"]
    _native.extension.poison_pool(True)
    torch.set_num_threads(1)

    def each(operator: str, cases: Iterable, check: Callable[[Any], None]) -> None:
        for case in cases:
            print(operator, case)
            check(case)

    each("bn_act", product(bn_act.CASES, bn_act.ACTS), lambda c: bn_act.check_case(*c, True, True, "cpu"))
    for module in (mixed_bn, depthwise_conv2d, pool_3x3, squeeze_excite):
        each(module.__name__, module.CASES, partial(module.check_case, backend="cpu"))
    each("pool_3x3, special values, stride", (1, 2), pool_3x3.check_special_values)
    each("chain", chain.POINTWISE + chain.DEPTHWISE + chain.CHAINS + chain.PLANS, chain.check_case)
    each("chain in bfloat16", chain.BFLOAT16_CASES, chain.check_bfloat16)


if __name__ == "__main__":
    main(*sys.argv[1:])
