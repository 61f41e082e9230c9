"""orthogonalize: Haar (semi-)orthogonal matrices from Gaussian ones, a list of any shapes in one call.

On a CPU, LAPACK does one matrix per thread, because it gains little from several threads within one of the usual sizes.
On a GPU, where PyTorch's QR loops over the matrices, the kernel of csrc/orthogonal does all of them at once.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import checks, reference
from nasfast.ops.autograd import transformed
from nasfast.ops.backends import resolve_backend

Item = TypeVar("Item")
Result = TypeVar("Result")

# Tensors on a GPU are filled together until they have this many elements, 256 MB in float64.
_GROUP_ELEMENTS = 1 << 25
# columns of a panel: kPanel in csrc/orthogonal/householder.h
_PANEL = 16
# Bytes per element that orthogonalize_ needs at most: the float64 draw, a working copy of it, and the result.
_BYTES_PER_ELEMENT = 3 * 8


def orthogonalize(matrices: Sequence[Tensor], *, backend: str | None = None) -> list[Tensor]:
    """Replace every matrix by the orthogonal factor of its QR decomposition with a positive diagonal of R.

    Z = Q R, and the result is Q diag(s) with s_k = sign(R_kk), sign(0) = +1. A wide matrix is transposed before and
    after. Gaussian input gives the Haar distribution (Mezzadri 2007). The result of an entry does not depend on the
    other entries or on their order.

    A matrix may be zero or rank-deficient: the columns of Q beyond the rank are then some orthonormal completion, which
    may differ between backends, and a zero matrix gives the identity. A 1 x 1 matrix gives its sign; an empty matrix
    stays empty.

    Args:
        matrices: (..., m_i, n_i) of any shapes and strides, on one device; leading dimensions are batches. float32 and
            float64 matrices are computed in their type, bfloat16 and float16 ones in float32 and cast at the end.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide.

    Returns:
        One contiguous tensor per entry, of its shape, dtype and device: orthonormal columns if m_i >= n_i, else
        orthonormal rows. The reference is differentiable, the native backends are not.

    Raises:
        TypeError: matrices is not a list of tensors, or an entry is not a floating tensor.
        ValueError: an entry has fewer than two dimensions, another device than the first, or a NaN or infinite element.
        MemoryError: the results do not fit into the physical memory of the machine; the message names the first entry
            that does not fit.
        RuntimeError: the named backend cannot serve, or a native one is asked for a gradient.
    """
    matrices = checks.check_matrices("orthogonalize", matrices)
    return _run(matrices, resolve_backend("orthogonalize", matrices[0], backend).name) if matrices else []


def _run(matrices: Sequence[Tensor], name: str) -> list[Tensor]:
    if name == "reference" or transformed():
        return reference.orthogonalize(matrices)
    if torch.is_grad_enabled() and any(z.requires_grad for z in matrices):
        raise RuntimeError(
            f"orthogonalize: the {name} backend has no gradient: pass detached tensors, or use backend='reference'"
        )
    wide = [z.detach().to(torch.promote_types(z.dtype, torch.float32)) for z in matrices]
    if name == "cpu":
        results = list(_on_threads(reference.orthogonal_factor, wide))
    else:
        results = in_blocks(wide, torch.ops.nasfast.householder)
    return [q.to(z.dtype).contiguous() for q, z in zip(results, matrices, strict=True)]


def _on_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """function(item) of each item in order, many at once, each on one thread: so threads change no bit."""
    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield from threads.map(torch.no_grad()(function), items)
    finally:
        torch.set_num_threads(count)  # what a worker sets holds for threads that begin later, too


@torch.no_grad()
def in_blocks(
    matrices: Sequence[Tensor], householder: Callable[[list[Tensor], list[Tensor], list[Tensor]], None]
) -> list[Tensor]:
    """`orthogonalize` of float32 and float64 matrices by the operator `householder` of csrc/library.cpp."""
    work = []
    for z in matrices:
        tall = reference.scale_columns(z if z.shape[-2] >= z.shape[-1] else z.mT)
        rows, columns = tall.shape[-2:]
        batch = tall.shape[:-2].numel()
        v = F.pad(tall.reshape(batch, rows, columns), (0, -columns % _PANEL)).contiguous()
        q = torch.eye(rows, columns, dtype=z.dtype, device=z.device).repeat(batch, 1, 1)
        work.append((v, q, v.new_empty(batch, v.shape[2] // _PANEL, _PANEL, _PANEL)))
    filled = [parts for parts in work if parts[1].numel()]
    if filled:
        householder(*([parts[i] for parts in filled] for i in range(3)))
    results = []
    for z, (v, q, _) in zip(matrices, work, strict=True):
        # the sign of R_kk is opposite to that of the first element of reflector k
        first = v.diagonal(dim1=-2, dim2=-1)[:, : q.shape[2]]
        q = q * torch.where(first > 0, -1.0, 1.0).to(q.dtype).unsqueeze(-2)
        results.append((q if z.shape[-2] >= z.shape[-1] else q.mT).reshape(z.shape).contiguous())
    return results


@torch.no_grad()
def orthogonalize_(
    tensors: Sequence[Tensor], *, seed: int = 0, names: Sequence[str] | None = None, gain: float = 1.0
) -> list[Tensor]:
    """Fill every tensor in place with a Haar (semi-)orthogonal matrix, as `torch.nn.init.orthogonal_` does with one.

    Tensor i is a matrix with shape[0] rows. Its Gaussian entries are those that `tensor_generator(names[i], seed)`
    draws in float64 on the CPU. They are orthogonalised in float64, and cast. So the result depends only on the seed,
    the name and the shape. It does not depend on the order, the dtype or the other tensors, and on the backend and the
    device only by rounding.

    Args:
        tensors: floating, two or more dimensions, any strides and devices; parameters may require gradients.
        seed: one for the whole list.
        names: one per tensor, such as the qualified names of parameters; None means "0", "1", and so on.
        gain: factor by which every matrix is multiplied.

    Returns:
        The tensors.

    Raises:
        TypeError: tensors is not a list of tensors, or an entry is not a floating tensor.
        ValueError: a tensor has fewer than two dimensions, or elements that share memory, as after `expand`; names are
            repeated or not one per tensor; gain is not finite.
        MemoryError: a tensor does not fit into the physical memory of the machine; the message has its index and name.
    """
    tensors, names = checks.check_orthogonal_targets("orthogonalize_", tensors, names, gain, _BYTES_PER_ELEMENT)
    fill_orthogonal([Target(*each, gain) for each in zip(names, tensors, map(_flat, tensors), strict=True)], seed)
    return tensors


@dataclass(frozen=True)
class Target:
    """A tensor to fill with `scale` times orthogonal matrices.

    Attributes:
        name: name of the random stream; targets of one name and shape get the same matrices.
        tensor: floating, of any device and strides.
        shape: (..., rows, columns) of the matrices; they have the elements of the tensor, row by row.
        scale: factor of every matrix.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    scale: float


@torch.no_grad()
def fill_orthogonal(targets: Sequence[Target], seed: int) -> None:
    """Fill every target in place; `orthogonalize_` says how."""
    for device, group in groupby(targets, key=lambda target: target.tensor.device):
        here = list(group)
        probe = torch.empty(0, device=device)
        if device.type == "cuda" and resolve_backend("orthogonalize", probe, strict=False).name == "cuda":
            _fill_on_gpu(here, seed)
            continue
        for target, q in zip(here, _on_threads(partial(_drawn, seed=seed), here), strict=True):
            target.tensor.copy_(q.reshape(target.tensor.shape))


def _drawn(target: Target, *, seed: int) -> Tensor:
    """What fills the target, in float64 on the CPU."""
    z = _gaussian((target.name, target.shape), seed=seed)
    rows = z if z.shape[-2] < z.shape[-1] else z.mT  # those that become orthonormal
    if z.ndim > 2 or not _well_conditioned(*rows.shape):
        return reference.orthogonal_factor(z).mul_(target.scale)
    # with Z'Z = R'R, Q = Z R^-1: half the operations of reflectors, at the speed of a matrix product
    torch.linalg.solve_triangular(torch.linalg.cholesky(rows @ rows.mT), rows, upper=False, out=rows)
    return z.mul_(target.scale)


def _well_conditioned(fewer: int, more: int) -> bool:
    """Whether a Gaussian matrix with these sides has a condition number of at most 64.

    The singular values are between sqrt(more) -+ (sqrt(fewer) + t), except with a probability of 2 exp(-t^2 / 2)
    (Davidson and Szarek 2001, theorem 2.13): 3e-8 for t = 6. Q by Cholesky departs from orthogonality by about the
    rounding of float64 times the square of this number, which is below 1e-12.
    """
    root, spread = math.sqrt(more), math.sqrt(fewer) + 6
    return fewer > 0 and root + spread <= 64 * (root - spread)


def _fill_on_gpu(targets: Sequence[Target], seed: int) -> None:
    while targets:
        count = elements = 0
        while count < len(targets) and elements < _GROUP_ELEMENTS:
            elements += targets[count].tensor.numel()
            count += 1
        group, targets = targets[:count], targets[count:]
        drawn = draw_gaussians([(target.name, target.shape) for target in group], seed)
        found = _run([z.to(target.tensor.device) for target, z in zip(group, drawn, strict=True)], "cuda")
        for target, q in zip(group, found, strict=True):
            target.tensor.copy_(q.mul_(target.scale).reshape(target.tensor.shape))


def tensor_generator(name: str, seed: int) -> torch.Generator:
    """CPU generator for one tensor, seeded with the first 8 bytes of SHA-256("di-init|seed|name")."""
    digest = hashlib.sha256(f"di-init|{seed}|{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def draw_gaussians(streams: Sequence[tuple[str, tuple[int, ...]]], seed: int) -> list[Tensor]:
    """Standard normal float64 tensors on the CPU, filled row by row.

    Args:
        streams: the name for `tensor_generator` and the shape of each tensor.
        seed: one for all.
    """
    return list(_on_threads(partial(_gaussian, seed=seed), streams))


def _gaussian(stream: tuple[str, tuple[int, ...]], *, seed: int) -> Tensor:
    name, shape = stream
    return torch.randn(shape, generator=tensor_generator(name, seed), dtype=torch.float64, device="cpu")


def _flat(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], math.prod(tensor.shape[1:])
