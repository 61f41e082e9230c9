"""orthogonalize: Haar (semi-)orthogonal matrices from Gaussian ones, a list of any shapes in one call.

On a CPU, LAPACK does one matrix per thread, because it gains little from several threads within one of the usual sizes.
On a GPU, where PyTorch's QR loops over the matrices, the kernel of csrc/orthogonal does all of them at once.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import Tensor

from nasfast.ops import _native, checks, reference
from nasfast.ops.autograd import recorded, transformed
from nasfast.ops.backends import resolve_backend
from nasfast.ops.householder import Operator, as_batch
from nasfast.ops.threads import on_threads

Draw = Callable[[list[Tensor], list[int]], None]
"""`gaussians` of csrc/library.cpp, or its emulation."""

# Tensors on a GPU are filled together until they have this many elements, 256 MB in float64.
_GROUP_ELEMENTS = 1 << 25
# Bytes per element that orthogonalize_ needs at most: the draw, a working copy of it, and the result.
_BYTES_PER_ELEMENT = 3 * 8
# The largest condition number of a Gaussian matrix whose Q is made by Cholesky: Q then departs from orthogonality by
# about the rounding of its type times the square of this number, 1e-12 in float64 and 2e-5 in float32, and by much less
# in nearly every draw, because the bound on the condition number holds for the worst one.
_CONDITION = {torch.float32: 16, torch.float64: 64}


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
        orthonormal rows. The reference is differentiable, the native backends are not. Under torch.func, torch.compile
        and other tracers, it is the reference.

    Raises:
        TypeError: matrices is not a list of tensors, or an entry is not a floating tensor.
        ValueError: an entry has fewer than two dimensions, another device than the first, or a NaN or infinite element.
        MemoryError: the results do not fit into the physical memory of the machine; the message names the first entry
            that does not fit.
        RuntimeError: the named backend cannot serve, or a native one is asked for a gradient.
    """
    matrices = _check_matrices("orthogonalize", matrices)
    return _run(matrices, resolve_backend("orthogonalize", matrices[0], backend).name) if matrices else []


def _run(matrices: Sequence[Tensor], name: str) -> list[Tensor]:
    if name == "reference" or transformed() or recorded():
        return reference.orthogonalize(matrices)
    if torch.is_grad_enabled() and any(z.requires_grad for z in matrices):
        raise RuntimeError(
            f"orthogonalize: the {name} backend has no gradient: pass detached tensors, or use backend='reference'"
        )
    wide = [z.detach().to(torch.promote_types(z.dtype, torch.float32)) for z in matrices]
    if name == "cpu":
        results = on_threads(reference.orthogonal_factor, wide, [_work(z.shape) for z in wide])
    else:
        results = in_blocks(wide, torch.ops.nasfast.householder)
    return [q.to(z.dtype).contiguous() for q, z in zip(results, matrices, strict=True)]


@torch.no_grad()
def in_blocks(matrices: Sequence[Tensor], householder: Operator) -> list[Tensor]:
    """`orthogonalize` of float32 and float64 matrices by the operator `householder` of csrc/library.cpp."""
    results = [torch.empty_like(z, memory_format=torch.contiguous_format) for z in matrices]
    householder([*map(as_batch, matrices)], [*map(as_batch, results)], [], [1.0] * len(results))
    return results


@torch.no_grad()
def orthogonalize_(
    tensors: Sequence[Tensor], *, seed: int = 0, names: Sequence[str] | None = None, gain: float = 1.0
) -> list[Tensor]:
    """Fill every tensor in place with a Haar (semi-)orthogonal matrix, as `torch.nn.init.orthogonal_` does with one.

    Tensor i is a matrix with shape[0] rows. Its Gaussian entries are those that `tensor_generator(names[i], seed)`
    draws in float64 on the CPU. A float64 tensor is computed in float64, any other one in float32, and cast. So the
    result depends only on the seed, the name and the shape, and on the dtype, the backend and the device only by
    rounding. It does not depend on the order or on the other tensors.

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
    tensors, names = _check_orthogonal_targets("orthogonalize_", tensors, names, gain, _BYTES_PER_ELEMENT)
    targets = [
        Target(name, tensor, (tensor.shape[0], math.prod(tensor.shape[1:])), gain)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    fill_orthogonal(targets, seed)
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
        neighbours = list(group)
        probe = torch.empty(0, device=device)
        if device.type == "cuda" and resolve_backend("orthogonalize", probe, strict=False).name == "cuda":
            operators = torch.ops.nasfast.gaussians, torch.ops.nasfast.householder
            # of targets that may share memory, the last one counts
            for batch in [neighbours] if _disjoint(neighbours) else [[target] for target in neighbours]:
                fill_together(batch, seed, *operators)
        elif _disjoint(neighbours):
            on_threads(partial(_fill, seed=seed), neighbours, [_work(target.shape) for target in neighbours])
        else:
            for target in neighbours:  # in this order, as the last one counts
                _fill(target, seed=seed)


def _disjoint(targets: Sequence[Target]) -> bool:
    """Whether no two targets may share memory."""
    extents = []
    for tensor in (target.tensor for target in targets if target.tensor.numel()):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extents.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    extents.sort()
    return all(end <= begin for (_, end), (begin, _) in pairwise(extents))


def _work(shape: tuple[int, ...]) -> int:
    """Operations of a decomposition, in some unit."""
    return math.prod(shape) * min(shape[-2:])


def _fill(target: Target, *, seed: int) -> None:
    """Fill a target, computing on the CPU."""
    z = _gaussian(target.name, target.shape, seed, _computed_in(target.tensor))
    wide = z.shape[-2] < z.shape[-1]
    if z.ndim == 2 and _well_conditioned(min(z.shape), max(z.shape), _CONDITION[z.dtype]):
        # with Z'Z = R'R, Q = Z R^-1: at the speed of a matrix product, which LAPACK's reflectors do not reach
        rows = z if wide else z.mT
        lower = torch.linalg.cholesky(rows @ rows.mT)
        scale = torch.eye(len(rows), dtype=z.dtype).mul_(target.scale)
        inverse = torch.linalg.solve_triangular(lower, scale, upper=False)
        q = inverse @ z if wide else z @ inverse.mT
    else:
        a, tau = torch.geqrf(z.mT if wide else z)
        signs = torch.where(a.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(z.dtype).mul_(target.scale)
        q = torch.linalg.householder_product(a, tau).mul_(signs.unsqueeze(-2))
        q = q.mT if wide else q
    target.tensor.copy_(q.reshape(target.tensor.shape))


def _computed_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _well_conditioned(fewer: int, more: int, condition: float) -> bool:
    """Whether a Gaussian matrix with these sides has at most this condition number.

    The singular values are between sqrt(more) -+ (sqrt(fewer) + t), except with a probability of 2 exp(-t^2 / 2)
    (Davidson and Szarek 2001, theorem 2.13): 3e-8 for t = 6.
    """
    root, spread = math.sqrt(more), math.sqrt(fewer) + 6
    return fewer > 0 and root + spread <= condition * (root - spread)


@torch.no_grad()
def fill_together(targets: Sequence[Target], seed: int, gaussians: Draw, householder: Operator) -> None:
    """`fill_orthogonal` on one device by the operators of csrc/library.cpp: draws, then orthogonalises, in place."""
    while targets:
        count = elements = 0
        while count < len(targets) and elements < _GROUP_ELEMENTS:
            elements += targets[count].tensor.numel()
            count += 1
        group, targets = targets[:count], targets[count:]
        draws = [_working_memory(target) for target in group]
        gaussians(draws, [_stream(target.name, seed) for target in group])
        matrices = [as_batch(z) for z in draws]
        householder(matrices, matrices, [], [target.scale for target in group])
        for target, q in zip(group, draws, strict=True):
            if q.data_ptr() != target.tensor.data_ptr():
                target.tensor.copy_(q.reshape(target.tensor.shape))
        # the operators know nothing of autograd
        torch.autograd.graph.increment_version([target.tensor for target in group])


def _working_memory(target: Target) -> Tensor:
    """The tensor itself as matrices, or memory for them in the type and order of the calculation."""
    tensor = target.tensor.detach()
    if tensor.is_contiguous() and tensor.dtype == _computed_in(tensor):
        return tensor.view(target.shape)
    return tensor.new_empty(target.shape, dtype=_computed_in(tensor))


def tensor_generator(name: str, seed: int) -> torch.Generator:
    """CPU generator for one tensor, seeded with the first 8 bytes of SHA-256("di-init|seed|name")."""
    return torch.Generator().manual_seed(_stream(name, seed))


def _stream(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"di-init|{seed}|{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def draw_gaussians(streams: Sequence[tuple[str, tuple[int, ...]]], seed: int) -> list[Tensor]:
    """Standard normal float64 tensors on the CPU, filled row by row.

    Args:
        streams: the name of the random stream and the shape of each tensor.
        seed: one for all.
    """
    return on_threads(
        lambda stream: _gaussian(*stream, seed, torch.float64), streams, [math.prod(shape) for _, shape in streams]
    )


def _gaussian(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """What torch.randn draws in float64 with `tensor_generator`, in `dtype`; the operator is eight times as fast."""
    if _native.extension is None:
        return torch.randn(shape, generator=tensor_generator(name, seed), dtype=torch.float64, device="cpu").to(dtype)
    z = torch.empty(shape, dtype=dtype, device="cpu")
    torch.ops.nasfast.gaussian_(z, _stream(name, seed))
    return z


def _check_matrices(op: str, matrices: Sequence[Tensor]) -> list[Tensor]:
    """Check the entries of `nasfast.ops.orthogonalize`; returns them as a list."""
    matrices = checks.list_of_tensors(op, "matrices", matrices)
    total = 0
    for i_matrix, z in enumerate(matrices):
        where = f"{op}: matrices[{i_matrix}]"
        _check_matrix(where, z)
        checks.check_device(where, z, matrices[0], "matrices[0]")
        total += z.numel() * z.element_size()
        checks.check_fits(where, z, total)
    filled = [z for z in matrices if z.numel()]
    # tracers and transforms cannot ask for values
    if not filled or filled[0].is_meta or recorded() or transformed():
        return matrices
    if not _probably_finite([z.detach() for z in filled]):
        for i_matrix, z in enumerate(matrices):
            if bad := z.numel() - int(z.isfinite().sum()):
                raise ValueError(
                    f"{op}: matrices[{i_matrix}] of shape {tuple(z.shape)} must be finite, "
                    f"got {bad} NaN or infinite elements"
                )
    return matrices


def _check_orthogonal_targets(
    op: str, tensors: Sequence[Tensor], names: Sequence[str] | None, gain: float, bytes_per_element: int
) -> tuple[list[Tensor], list[str]]:
    """Check the arguments of `nasfast.ops.orthogonalize_`; returns its tensors and names as lists.

    Args:
        bytes_per_element: memory that the operator needs for each element of a tensor.
    """
    tensors = checks.list_of_tensors(op, "tensors", tensors)
    names = [str(i) for i in range(len(tensors))] if names is None else list(names)
    if len(names) != len(tensors):
        raise ValueError(f"{op}: names must be one per tensor, {len(tensors)}, got {len(names)}")
    if not math.isfinite(gain):
        raise ValueError(f"{op}: gain must be finite, got {gain}")
    for i_tensor, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
        where = f"{op}: tensors[{i_tensor}] ({name!r})"
        _check_matrix(where, tensor)
        checks.check_fits(where, tensor, bytes_per_element * tensor.numel())
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise ValueError(f"{where} has elements that share memory, as expand makes them: pass tensor.clone()")
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(f"{op}: names must differ, as they seed the tensors, got {twice!r} more than once")
    return tensors, names


def _probably_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is NaN or infinite, from one read of all tensors. It may be False although all are finite."""
    if tensors[0].is_cuda:
        return bool(torch.nn.utils.get_total_norm(tensors, float("inf")).isfinite())
    # ten times as fast on a CPU as norms or isfinite; the sum of finite elements may overflow
    return bool(torch.stack([z.sum().double() for z in tensors]).isfinite().all())


def _check_matrix(where: str, z: Tensor) -> None:
    checks.check_tensor(where, z)
    if z.dtype not in checks.FLOAT_TYPES:
        raise TypeError(
            f"{where} must be float32, float64, bfloat16 or float16, got {z.dtype}; convert it with .float()"
        )
    checks.check_shape_of_matrix(where, z)
