"""qr and geqrf: PyTorch's factorisations, for batches of matrices.

On a CPU, LAPACK does one matrix per thread. On a GPU, where PyTorch's loop over the matrices, the kernel of
csrc/orthogonal does all of them at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nasfast.ops import checks
from nasfast.ops.autograd import recorded, transformed
from nasfast.ops.backends import resolve_backend
from nasfast.ops.refusal import Refusal
from nasfast.ops.tensors import autocasts
from nasfast.ops.threads import on_threads

Operator = Callable[[list[Tensor], list[Tensor], list[Tensor], list[float]], None]
"""`householder` of csrc/library.cpp, or its emulation."""

# parts of a batch per thread: enough that all threads end together, few enough that a part is worth a call
_PARTS_PER_THREAD = 4
# columns and rows below which PyTorch's own loop over a batch was faster (9 x 9 and 64 x 32 against 176 x 176)
_LARGE = 128


class QR(NamedTuple):
    """The factors of A = Q R."""

    Q: Tensor
    R: Tensor


class Geqrf(NamedTuple):
    """R in the upper triangle of `a`, the reflectors below it, and their factors `tau`, as in LAPACK."""

    a: Tensor
    tau: Tensor


def qr(A: Tensor, mode: str = "reduced", *, backend: str | None = None) -> QR:  # noqa: N803  # the name in torch.linalg
    """`torch.linalg.qr` of a batch of matrices: A = Q R with orthonormal columns of Q and an upper triangular R.

    The signs on the diagonal of R are those of LAPACK on a CPU, and not negative on a GPU. If A does not have full
    rank, the columns of Q beyond the rank are some orthonormal completion, and the diagonal of R there is rounding of
    either sign. There is no `out`.

    Args:
        A: (..., m, n), any strides; leading dimensions are a batch. float32, float64 or complex; also bfloat16 or
            float16 under autocast on a CPU, where they become float32.
        mode: `reduced` gives Q (..., m, k) and R (..., k, n) with k = min(m, n); `complete` gives Q (..., m, m) and R
            (..., m, n); `r` gives the R of `reduced` and an empty Q.
        backend: one of `nasfast.ops.BACKENDS`; None lets context, environment and device decide, and takes the
            reference, PyTorch, if a gradient is needed, for complex numbers and halves, and under torch.func,
            torch.compile and other tracers.

    Raises:
        TypeError: A is not a dense tensor of these types.
        ValueError: A has fewer than two dimensions, or the mode is unknown.
        RuntimeError: the named backend cannot serve, as a native one where None takes the reference.
    """
    _check_qr("qr", A, mode)
    name = resolve_backend("qr", A, backend, partial(_why_not_native, A)).name
    if name == "reference":
        return QR(*torch.linalg.qr(A, mode))
    if name == "cuda":
        return qr_of_reflectors(A, mode, torch.ops.nasfast.householder)
    if mode == "r":  # the parts have no Q
        return QR(A.new_empty(0), *_in_parts(lambda part: torch.linalg.qr(part, "r")[1:], A))
    return QR(*_in_parts(partial(torch.linalg.qr, mode=mode), A))


def geqrf(input: Tensor, *, backend: str | None = None) -> Geqrf:  # the name in torch
    """`torch.geqrf` of a batch of matrices: the Householder reflectors of a QR factorisation, in LAPACK's form.

    `torch.linalg.householder_product(a, tau)` is Q, and `a.triu()` has R in its first min(m, n) rows. As in PyTorch, it
    has no gradient; `qr` has one.

    Args:
        input: (..., m, n), as for `qr`.
        backend: as for `qr`.

    Returns:
        a: (..., m, n), and tau: (..., min(m, n)).

    Raises:
        TypeError, ValueError, RuntimeError: as for `qr`.
    """
    _check_qr("geqrf", input)
    name = resolve_backend("geqrf", input, backend, partial(_why_not_native, input)).name
    if name == "cuda":
        return geqrf_of_reflectors(input, torch.ops.nasfast.householder)
    return Geqrf(*(torch.geqrf(input) if name == "reference" else _in_parts(torch.geqrf, input)))


def _why_not_native(a: Tensor, name: str) -> Refusal | None:
    if name == "reference":
        return None
    if a.dtype not in (torch.float32, torch.float64):
        return Refusal(f"serves float32 and float64, got {a.dtype}")
    if transformed() or recorded():
        return Refusal("cannot be transformed or traced: use backend='reference'")
    if a.requires_grad and torch.is_grad_enabled():
        return Refusal("has no gradient: pass a detached tensor, or use backend='reference'")
    return None


def _in_parts(function: Callable[[Tensor], Sequence[Tensor]], a: Tensor) -> list[Tensor]:
    """function(a) for a batch of large matrices, in parts on all cores; one matrix alone has all of them."""
    batch = a.shape[:-2]
    parts = min(batch.numel(), _PARTS_PER_THREAD * torch.get_num_threads())
    if parts <= 1 or min(a.shape[-2:]) < _LARGE:
        return list(function(a))
    pieces = a.reshape(-1, *a.shape[-2:]).tensor_split(parts)
    results = on_threads(function, pieces, [piece.shape[0] for piece in pieces])
    return [torch.cat(factor).unflatten(0, batch) for factor in zip(*results, strict=True)]


def as_batch(z: Tensor) -> Tensor:
    """A view, or copy, of matrices (..., m, n) with at most one dimension before them."""
    return z if z.ndim <= 3 else z.flatten(0, -3)


def _reflect(a: Tensor, householder: Operator) -> tuple[Tensor, Tensor]:
    """Of matrices (..., m, n) that are not wide, both of this shape: Q where R has a positive diagonal, and reflectors.

    Reflector v_k begins in row k of column k; H_k = I - 2 v_k v_k' / |v_k|^2, or I if v_k is zero. The first columns of
    H_1 .. H_n are those of Q but for their signs, which are opposite to those of the first elements of the reflectors.
    """
    q, v = a.new_empty(a.shape), a.new_empty(a.shape)
    householder([as_batch(a)], [as_batch(q)], [as_batch(v)], [1.0])
    return q, v


@torch.no_grad()
def qr_of_reflectors(a: Tensor, mode: str, householder: Operator) -> QR:
    """`qr` by the operator `householder`."""
    rows, columns = a.shape[-2:]
    tall = a[..., : min(rows, columns)]
    if mode == "complete" and rows > columns:
        tall = F.pad(a, (0, rows - columns))  # the reflectors of zeros are none
    q, _ = _reflect(tall, householder)
    return QR(q if mode != "r" else a.new_empty(0), _triangle(q, a))


@torch.no_grad()
def geqrf_of_reflectors(a: Tensor, householder: Operator) -> Geqrf:
    """`geqrf` by the operator `householder`."""
    rank = min(a.shape[-2:])
    q, v = _reflect(a[..., :rank], householder)
    first = v.diagonal(dim1=-2, dim2=-1)
    below = (v / torch.where(first == 0, 1, first).unsqueeze(-2)).tril(-1)
    result = F.pad(below, (0, a.shape[-1] - rank))
    result[..., :rank, :] += _triangle(torch.where(first.unsqueeze(-2) > 0, -q, q), a)
    return Geqrf(result, torch.where(first == 0, 0, 2 / (1 + below.square().sum(-2))))


def _triangle(q: Tensor, a: Tensor) -> Tensor:
    """R = Q' A; in float64, because a product in float32 may be one of TensorFloat-32."""
    return (q.double().mT @ a.double()).triu().to(a.dtype)


def _check_qr(op: str, a: Tensor, mode: str = "reduced") -> None:
    """Check the arguments of `nasfast.ops.qr` and `nasfast.ops.geqrf`."""
    where = f"{op}: the matrix"
    checks.check_tensor(where, a)
    wide = (torch.float32, torch.float64, torch.complex64, torch.complex128)
    if a.dtype not in wide and not (a.is_floating_point() and autocasts(a)):
        raise TypeError(f"{where} must be float32, float64 or complex, got {a.dtype}; convert it with .float()")
    checks.check_shape_of_matrix(where, a)
    if mode not in (modes := ("reduced", "complete", "r")):
        raise ValueError(f"{op}: mode must be one of {', '.join(modes)}, got {mode!r}")
