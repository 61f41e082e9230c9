"""Chains on the CUDA kernels of csrc/gpu and kernels/cuda.

`limits` says which these are, `conv` has the launchers behind the registered operators, and `static` has chains on
buffers of the caller, whose last BatchNorm may be `deferred`.
"""
