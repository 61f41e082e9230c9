"""Functional operators of frozen-weight supernets, each with a reference and faster backends behind one contract.

May import `runtime` and `spaces`. Begin with `reference`, which has the formulas, then `conv` and `backends`.
"""

from nasfast.ops import modules, reference
from nasfast.ops._native import empty_cache
from nasfast.ops.backends import BACKENDS, resolve_backend, use_backend
from nasfast.ops.bn import bn_act
from nasfast.ops.chain.call import conv_bn_act, conv_bn_act_chain
from nasfast.ops.depthwise import depthwise_conv2d
from nasfast.ops.householder import geqrf, qr
from nasfast.ops.mixed import mixed_bn
from nasfast.ops.orthogonal import orthogonalize, orthogonalize_
from nasfast.ops.pooling import pool_3x3
from nasfast.ops.reference import ConvBNParams, Stage
from nasfast.ops.squeeze import squeeze_excite

__all__ = [
    "BACKENDS",
    "ConvBNParams",
    "Stage",
    "bn_act",
    "conv_bn_act",
    "conv_bn_act_chain",
    "depthwise_conv2d",
    "empty_cache",
    "geqrf",
    "mixed_bn",
    "modules",
    "orthogonalize",
    "orthogonalize_",
    "pool_3x3",
    "qr",
    "reference",
    "resolve_backend",
    "squeeze_excite",
    "use_backend",
]
