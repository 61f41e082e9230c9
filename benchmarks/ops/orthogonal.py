"""Cases of orthogonalize and orthogonalize_: the weights of the 6^20 supernet; qr and geqrf: batches of one shape.

For orthogonalize they are in size classes. A depthwise weight is a batch of k x k filters, any other weight one matrix.
All providers get the same Gaussian input. orthogonalize_ draws its matrices itself, and a depthwise weight is one flat
matrix, as for torch.nn.init.orthogonal_.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor, nn

import nasfast
from benchmarks.floor import Machine
from benchmarks.ops.cases import FORWARD, Call, Case, Setting, Size
from nasfast import ops

# largest number of columns in each class; a wide matrix is transposed first
_LIMITS = (32, 64, 128, 256)
_NAMES = (*(f"n up to {limit}" for limit in _LIMITS), f"n over {_LIMITS[-1]}")
CLASSES = ("filters", *_NAMES, "all")
# (count, rows, columns)
_BATCHES = ((8192, 9, 9), (4096, 64, 32), (40, 176, 176), (40, 352, 352), (512, 1536, 256))


def cases(size: Size) -> list[Case]:
    weights_of = "weights of mobilenet_v2" if size.matrices is None else f"{size.matrices} weights of mobilenet_v2"
    by_class = [
        Case(
            "orthogonalize",
            name,
            weights_of,
            partial(_call, name, size),
            peers=tuple(PEERS),
            dtypes=("fp32",),
            passes=(FORWARD,),
            floor=partial(_least_ms, name, size),
        )
        for name in CLASSES
    ]
    fill = Case(
        "orthogonalize",
        "fill",
        weights_of,
        partial(_fill, size),
        peers=(INIT_LOOP,),
        compared=_gram,
        dtypes=("fp32",),
        passes=(FORWARD,),
    )
    batches = [
        Case(
            op,
            "batch",
            "x".join(map(str, shape)),
            partial(_factor, op, shape),
            peers=(TORCH,),
            compared=torch.abs,  # the signs of R differ
            dtypes=("fp32",),
            passes=(FORWARD,),
        )
        for op in FACTORS
        for shape in [(max(1, count // size.divisor), rows, columns) for count, rows, columns in _BATCHES]
    ]
    return [*by_class, fill, *batches]


@cache
def _shapes() -> list[tuple[torch.Size, bool]]:
    """The shape of every weight, and whether it is depthwise."""
    net = nasfast.Supernet(nasfast.spaces.mobilenet_v2(), init="he")
    layers = [module for module in net.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    return [(m.weight.shape, isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1) for m in layers]


@cache
def weights() -> dict[str, list[Tensor]]:
    """Size class -> Gaussian matrices on the CPU, in float32."""
    generator = torch.Generator().manual_seed(0)
    classes: dict[str, list[Tensor]] = {name: [] for name in CLASSES}
    for shape, depthwise in _shapes():
        if depthwise:
            name, size = "filters", (shape[0], *shape[2:])
        else:
            size = (shape[0], shape[1:].numel())
            name = _NAMES[sum(min(size) > limit for limit in _LIMITS)]
        z = torch.randn(size, generator=generator)
        classes[name].append(z)
        classes["all"].append(z)
    return classes


def _call(name: str, size: Size, setting: Setting) -> Call:
    matrices = [z.to(setting.device) for z in weights()[name][: size.matrices]]
    function = ops.orthogonalize if setting.ours else PEERS[setting.provider]
    return Call(lambda *zs: function(list(zs)), matrices)


def _fill(size: Size, setting: Setting) -> Call:
    tensors = [torch.empty(shape, device=setting.device) for shape, _ in _shapes()[: size.matrices]]
    if setting.ours:
        return Call(lambda *ws: nasfast.orthogonalize_(ws), tensors)
    return Call(lambda *ws: [nn.init.orthogonal_(w) for w in ws], tensors)


def _factor(op: str, shape: tuple[int, int, int], setting: Setting) -> Call:
    ours, peer = FACTORS[op]
    function = partial(ours, backend=setting.provider) if setting.ours else peer
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(setting.device)
    # what is compared is R: that of qr, and that of geqrf with zeros in place of the reflectors
    return Call((lambda a: function(a)[1]) if op == "qr" else (lambda a: function(a)[0].triu()), [z])


def _gram(weight: Tensor) -> Tensor:
    """The products of the rows, or of the columns if these are fewer; those of orthonormal vectors are 0 and 1."""
    matrix = weight.flatten(1)
    return matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix


def _least_ms(name: str, size: Size, machine: Machine, dtype: str, passes: str) -> float:
    """The time at the rate of a large matrix product."""
    return 1e3 * sum(map(flops, weights()[name][: size.matrices])) / machine.matmul


def flops(z: Tensor) -> float:
    """Operations of a Householder QR and of forming Q, as LAPACK counts them: 2 (2 m n^2 - 2 n^3 / 3) per matrix."""
    m, n = max(z.shape[-2:]), min(z.shape[-2:])
    return z.numel() / (m * n) * 2 * (2 * m * n**2 - 2 * n**3 / 3)


def torch_qr(z: Tensor) -> Tensor:
    """Orthogonalise a matrix as torch.nn.init.orthogonal_ does."""
    tall = z if z.shape[-2] >= z.shape[-1] else z.mT
    q, r = torch.linalg.qr(tall)
    q *= r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return (q if tall is z else q.mT).contiguous()


def torch_householder(z: Tensor) -> Tensor:
    """Orthogonalise a matrix in the same way, but without forming R."""
    tall = z if z.shape[-2] >= z.shape[-1] else z.mT
    a, tau = torch.geqrf(tall)
    signs = a.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    q = torch.linalg.householder_product(a, tau).mul_(signs)
    return (q if tall is z else q.mT).contiguous()


def grouped_qr(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalise all matrices, with one torch.linalg.qr per shape."""
    groups: dict[torch.Size, list[Tensor]] = {}
    for z in matrices:
        groups.setdefault(z.shape, []).append(z)
    results = {shape: iter(torch_qr(torch.stack(group))) for shape, group in groups.items()}
    return [next(results[z.shape]) for z in matrices]


INIT_LOOP = "torch.nn.init loop"
TORCH = "torch"
FACTORS = {"qr": (ops.qr, torch.linalg.qr), "geqrf": (ops.geqrf, torch.geqrf)}
PEERS = {
    "qr loop": lambda zs: [torch_qr(z) for z in zs],
    "geqrf loop": lambda zs: [torch_householder(z) for z in zs],
    "qr grouped": grouped_qr,
}
