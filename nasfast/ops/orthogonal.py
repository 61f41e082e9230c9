"""orthogonalize: Haar (semi-)orthogonal matrices from Gaussian ones, a list of any shapes in one call."""

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from nasfast.ops import _native, checks, reference
from nasfast.ops.autograd import check_device
from nasfast.ops.backends import inner_backend, resolve_backend

# Tensors are filled together until they have this many elements: enough work for every thread, and about 256 MB where
# the matrices are held in float64.
_GROUP_ELEMENTS = 1 << 25
_ON_CPU = torch.empty(0, device="cpu")  # for choosing the backend of tensors on the CPU
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


def orthogonalize_draws(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonalize` for functions that fill weights; a named backend that cannot serve is skipped."""
    return _run(matrices, inner_backend("orthogonalize", matrices[0]).name) if matrices else []


def _run(matrices: Sequence[Tensor], name: str) -> list[Tensor]:
    if name == "reference":
        return reference.orthogonalize(matrices)
    if torch.is_grad_enabled() and any(z.requires_grad for z in matrices):
        raise RuntimeError(
            f"orthogonalize: the {name} backend has no gradient: pass detached tensors, or use backend='reference'"
        )
    half = (torch.bfloat16, torch.float16)
    results = torch.ops.nasfast.orthogonalize([z.detach().float() if z.dtype in half else z.detach() for z in matrices])
    return [q.to(z.dtype) for q, z in zip(results, matrices, strict=True)]


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
    group: list[Target] = []
    elements = 0
    for i_target, target in enumerate(targets):
        group.append(target)
        elements += target.tensor.numel()
        if i_target + 1 == len(targets) or elements >= _GROUP_ELEMENTS:
            for device in {target.tensor.device for target in group}:
                here = [target for target in group if target.tensor.device == device]
                # the native operator draws each matrix itself: faster, and needs no memory for all draws at once
                native = _workplace(device) == "cpu" and inner_backend("orthogonalize", _ON_CPU).name == "cpu"
                (_fill_natively if native else _fill_drawn)(here, seed)
            group, elements = [], 0


def _fill_natively(targets: Sequence[Target], seed: int) -> None:
    storages: set[int] = set()
    direct = []
    for x in (target.tensor for target in targets):
        # Threads write in any order. Of tensors that share memory, as tied weights do, the last in the list must count.
        storage = x.untyped_storage()._cdata
        serves = x.device.type == "cpu" and x.is_contiguous() and x.dtype in (torch.float32, torch.float64)
        direct.append(serves and storage not in storages)
        storages.add(storage)
    matrices = [
        (x.tensor if here else torch.empty(x.tensor.shape, dtype=torch.float64, device="cpu")).view(x.shape)
        for x, here in zip(targets, direct, strict=True)
    ]
    seeds = torch.tensor([_stream_seed(target.name, seed) for target in targets], device="cpu")
    scales = torch.tensor([target.scale for target in targets], dtype=torch.float64, device="cpu")
    torch.ops.nasfast.fill_orthogonal(matrices, seeds, scales)
    for target, matrix, here in zip(targets, matrices, direct, strict=True):
        if here:
            torch.autograd.graph.increment_version(target.tensor)  # autograd does not see what the operator writes
        else:
            target.tensor.copy_(matrix.reshape(target.tensor.shape))


def _fill_drawn(targets: Sequence[Target], seed: int) -> None:
    drawn = draw_gaussians([(target.name, [target.shape]) for target in targets], seed)
    place = _workplace(targets[0].tensor.device)
    for target, q in zip(targets, orthogonalize_draws([z.to(place) for (z,) in drawn]), strict=True):
        target.tensor.copy_(q.mul_(target.scale).reshape(target.tensor.shape))


def tensor_generator(name: str, seed: int) -> torch.Generator:
    """CPU generator for one tensor, seeded with the first 8 bytes of SHA-256("di-init|seed|name")."""
    return torch.Generator().manual_seed(_stream_seed(name, seed))


def _stream_seed(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"di-init|{seed}|{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def draw_gaussians(streams: Sequence[tuple[str, Sequence[tuple[int, ...]]]], seed: int) -> list[list[Tensor]]:
    """Standard normal float64 tensors on the CPU, filled row by row.

    Args:
        streams: names for `tensor_generator`, each with the shapes to draw from that generator, in order.
        seed: one for all streams.
    """

    def draw(stream: tuple[str, Sequence[tuple[int, ...]]]) -> list[Tensor]:
        name, shapes = stream
        generator = tensor_generator(name, seed)
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    # Every stream has its own generator, so threads change no bit.
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(draw, streams))


def _flat(tensor: Tensor) -> tuple[int, int]:
    return tensor.shape[0], math.prod(tensor.shape[1:])


def _workplace(device: torch.device) -> torch.device | str:
    """The device on which to orthogonalise for `device`: a GPU only if the cuda backend runs there.

    PyTorch's own QR on a GPU loops over the matrices.
    """
    native = device.type == "cuda" and inner_backend("orthogonalize", torch.empty(0, device=device)).name == "cuda"
    return device if native else "cpu"


def _orthogonalize_fake(matrices):
    check_device(*matrices)
    return [torch.empty_like(z, memory_format=torch.contiguous_format) for z in matrices]


def _orthogonalize_emulated_fake(matrices, backwards):
    return _orthogonalize_fake(matrices)


if _native.extension is not None:
    torch.library.register_fake("nasfast::orthogonalize", _orthogonalize_fake)
    torch.library.register_fake("nasfast::orthogonalize_emulated", _orthogonalize_emulated_fake)
    torch.library.register_fake("nasfast::fill_orthogonal", lambda out, seeds, scales: None)
