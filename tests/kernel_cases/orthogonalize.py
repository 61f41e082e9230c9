"""Matrices for orthogonalize and fill_orthogonal, and the checks of their results against float64."""

import zlib
from collections.abc import Callable, Sequence

import torch

from nasfast.ops import reference

# max |Q'Q - I| on native types; the reference computes float32 in float64 and casts
EXACTNESS = {torch.float32: 2e-6, torch.float64: 1e-12}
# max |Q - Q in float64|: rounding of the input's type, times the condition of the worst Gaussian matrix here
SAME_Q = {torch.float32: 2e-4, torch.float64: 1e-11}

# around the borders of panels (16), tiles (64), tiny matrices (64 elements) and classes (64 and 256 columns)
SHAPES = [
    (7, 7),
    (12, 5),
    (5, 12),
    (1, 1),
    (1, 4),
    (4, 1),
    (64, 1),
    (1, 100),
    (8, 8),
    (9, 8),
    (16, 16),
    (17, 17),
    (16, 40),
    (40, 15),
    (64, 48),
    (65, 65),
    (100, 33),
    (33, 100),
    (130, 129),
    (300, 257),
    (257, 400),
]
# batches, as depthwise filters come
BATCHES = [(130, 3, 3), (65, 5, 5), (40, 7, 7), (2, 3, 9, 20), (3, 2, 4), (3, 40, 24)]


def gaussian(shape, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(zlib.crc32(str(shape).encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def tall(z: torch.Tensor) -> torch.Tensor:
    return z if z.shape[-2] >= z.shape[-1] else z.mT


def departure(q: torch.Tensor) -> float:
    """max |Q'Q - I| of columns or rows, in float64."""
    q = tall(q.double())
    return (q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)).abs().max().item()


def check(
    orthogonalize: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """The columns, or rows, are orthonormal, and Q is that of the QR decomposition in float64."""
    matrices = [gaussian(shape, dtype, device) for shape in shapes]
    exact = reference.orthogonalize([z.double() for z in matrices])
    for z, q, want in zip(matrices, orthogonalize(matrices), exact, strict=True):
        assert q.shape == z.shape and q.dtype == dtype and q.device == z.device and q.is_contiguous()
        assert departure(q) <= EXACTNESS[dtype], z.shape
        # not Q itself: a square Gaussian matrix may be badly conditioned
        r = tall(q.double()).mT @ tall(z.double())
        bound = 20 * torch.finfo(dtype).eps * z.double().norm(dim=(-2, -1), keepdim=True)
        assert (r.tril(-1).abs() <= bound).all(), z.shape
        assert (r.diagonal(dim1=-2, dim2=-1) > -bound.squeeze(-1)).all(), z.shape
        if tall(z).shape[-2] > tall(z).shape[-1] + 2:
            assert (q.double() - want).abs().max() <= SAME_Q[dtype], z.shape


# One of each way to draw and to orthogonalise: fewer than 16 numbers, a last block of 16 that is not whole, more
# numbers than are drawn at once; tiny, by reflectors, by Cholesky with one and several blocks of columns, tall and
# wide.
DRAWN = [
    *((1, 1), (1, 5), (5, 3), (4, 4), (1, 16), (17, 1), (3, 3, 3), (70, 5, 5), (2, 9, 20)),
    *((40, 27), (56, 96), (192, 32), (32, 193), (336, 112), (128, 768), (512, 150), (0, 4)),
]


def check_fill(shape: tuple[int, ...]) -> None:
    """fill_orthogonal makes the orthogonal factors of what torch.randn draws in float64."""
    for seed, scale in ((0, 1.0), (2**40 + 7, -2.5), (-1, 3.0)):
        z = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        (want,) = reference.orthogonalize([z])
        outs = [torch.full(shape, torch.nan, dtype=dtype) for dtype in (torch.float64, torch.float32)]
        scales = torch.tensor([scale, scale], dtype=torch.float64)
        torch.ops.nasfast.fill_orthogonal(outs, torch.tensor([seed, seed]), scales)
        q = outs[0] / scale
        assert torch.equal(outs[0].float(), outs[1]), shape
        assert (q - want).abs().sum() <= SAME_Q[torch.float64] * max(1, z.numel()), shape
        if z.numel():
            assert departure(q) <= EXACTNESS[torch.float64], shape
