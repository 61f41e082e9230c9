"""How close two results must be, by the type of the result; one table for all operator tests."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """|got - want| <= relative * |want| + scale * max(max|want|, floor), element by element."""

    relative: float
    scale: float


TOLERANCES = {
    # rounding of one float64 operation, times the terms of a sum
    torch.float64: Tolerance(1e-12, 1e-12),
    # some ten float32 roundings of 6e-8 each; sums of opposite signs keep the error of their largest terms
    torch.float32: Tolerance(2e-6, 4e-6),
    # one rounding to 8 significant bits (2^-9) of a float32 result
    torch.bfloat16: Tolerance(4.2e-3, 1e-5),
    # one rounding to 11 significant bits
    torch.float16: Tolerance(5.3e-4, 1e-5),
}

# chains of bfloat16 convolutions round between every two operators
BFLOAT16_CHAIN = Tolerance(2e-2, 2e-2)
# float32 convolutions sum in another order than float64 ones
FLOAT32_CHAIN = Tolerance(1e-5, 1e-5)
# the native chains, of six stages at most, measured against the size of the terms of each sum (`floor`): a third of it
NATIVE_CHAIN = Tolerance(2e-6, 2e-6)


def assert_close(
    name: str, got: Tensor, want: Tensor, tolerance: Tolerance | None = None, *, floor: float = 0.0
) -> None:
    """Compare one result with a more precise one; the message names the tensor, the index and both values.

    Args:
        got: the result under test; its type chooses the tolerance unless one is given.
        want: the oracle, float64.
        floor: magnitude of the terms of which the result is a sum or difference, where they may cancel.
    """
    relative, scale = tolerance or TOLERANCES[got.dtype]
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.numel() == 0:
        return
    difference = (got.detach().to(torch.float64) - want.detach()).abs()
    allowed = relative * want.detach().abs() + scale * max(float(want.detach().abs().max()), floor)
    # written so that a NaN on either side fails
    excess = torch.where(difference <= allowed, -torch.inf, difference - allowed).nan_to_num(nan=torch.inf)
    worst = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)) if got.ndim else ()
    assert excess.max() <= 0, (
        f"{name}[{index}]: got {got[index].item()!r}, expected {want[index].item()!r}, "
        f"allowed difference {allowed[index].item():.3g}; {int((excess > 0).sum())} of {got.numel()} elements differ"
    )
