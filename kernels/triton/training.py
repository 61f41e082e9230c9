"""What a training step computes besides its network: the loss with its gradient, and the update of the parameters.

Each kernel replaces a dozen small launches of PyTorch. Programs add up as those of common.py do: each stores a row, and
the last one adds the rows in their order.
"""

import triton
import triton.language as tl

from .common import _comes_last

# rows that the last program adds at once
AT_ONCE = tl.constexpr(1024)


@triton.jit
def _sum(at, count):
    """The sum of `count` numbers that other programs have stored."""
    total = 0.0
    for start in range(0, count, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        total += tl.sum(tl.load(at + i, mask=i < count, other=0.0, cache_modifier=".cg"), 0)
    return total


@triton.jit(do_not_specialize=["smoothing", "N"])
def cross_entropy_kernel(
    logits, labels, gradient, rows, arrivals, outcome, smoothing, N, C: tl.constexpr, CLASSES: tl.constexpr
):
    """Compute outcome (2,), the mean loss and the number of correct predictions, and the gradient of the mean loss.

    A program computes one row of the logits (N, C). rows (2, N): the loss of each row, and whether it is correct.
    """
    n = tl.program_id(0)
    c = tl.arange(0, CLASSES)
    at = n.to(tl.int64) * C + c
    v = tl.load(logits + at, mask=c < C, other=float("-inf")).to(tl.float32)
    label = tl.load(labels + n)
    most = tl.max(v, 0)
    # distances from the maximum, so that no digits are lost where all logits are large
    d = v - most
    e = tl.exp(d)
    total = tl.sum(e, 0)
    is_label = c == label
    at_label = tl.sum(tl.where(is_label, d, 0.0), 0)
    mean = tl.sum(tl.where(c < C, d, 0.0), 0) / C
    # like PyTorch's for -inf: without smoothing, the mean must not make NaN of it
    smooth = tl.where(smoothing > 0.0, smoothing * mean, 0.0)
    loss = tl.log(total) - (1.0 - smoothing) * at_label - smooth
    loss = tl.where((label >= 0) & (label < C), loss, float("nan"))
    slope = (e / total - tl.where(is_label, 1.0 - smoothing, 0.0) - smoothing / C) / N
    tl.store(gradient + at, slope.to(gradient.dtype.element_ty), mask=c < C)
    predicted = tl.min(tl.where(d == 0.0, c, CLASSES), 0)
    tl.store(rows + n, loss)
    tl.store(rows + N + n, (predicted == label).to(tl.float32))
    if _comes_last(arrivals, N):
        tl.store(outcome, _sum(rows, N) / N)
        tl.store(outcome + 1, _sum(rows + N, N))


@triton.jit
def _pieces(table, offset: tl.constexpr, SIZE: tl.constexpr):
    """Addresses of this program's piece of a tensor, and which of them are in it; table [programs][4]: the first byte
    of the piece in parameters, gradients and momenta, and its number of elements."""
    row = table + 4 * tl.program_id(0)
    i = tl.arange(0, SIZE)
    first = tl.load(row + offset).to(tl.pointer_type(tl.float32))
    return first + i, i < tl.load(row + 3)


@triton.jit(do_not_specialize=["PIECES"])
def gradient_norm_kernel(table, rows, arrivals, norm, PIECES, SIZE: tl.constexpr):
    """Compute the norm of all gradients. rows (PIECES,): the sum of squares of each piece."""
    at, there = _pieces(table, 1, SIZE)
    g = tl.load(at, mask=there, other=0.0)
    tl.store(rows + tl.program_id(0), tl.sum(g * g, 0))
    if _comes_last(arrivals, PIECES):
        tl.store(norm, tl.sqrt_rn(_sum(rows, PIECES)))


@triton.jit(do_not_specialize=["clip", "lr", "momentum", "decay"])
def sgd_kernel(table, norm, clip, lr, momentum, decay, NESTEROV: tl.constexpr, SIZE: tl.constexpr):
    """One step of SGD with the gradients scaled to a norm of at most `clip`, as torch.optim.SGD makes it."""
    at, there = _pieces(table, 0, SIZE)
    gradient_at, _ = _pieces(table, 1, SIZE)
    momentum_at, _ = _pieces(table, 2, SIZE)
    scale = clip / (tl.load(norm) + 1e-6)
    scale = tl.where(scale > 1.0, 1.0, scale)  # NaN stays
    p = tl.load(at, mask=there, other=0.0)
    g = tl.load(gradient_at, mask=there, other=0.0) * scale + decay * p
    m = tl.load(momentum_at, mask=there, other=0.0) * momentum + g
    tl.store(momentum_at, m, mask=there)
    if NESTEROV:
        m = g + momentum * m
    tl.store(at, p - lr * m, mask=there)
