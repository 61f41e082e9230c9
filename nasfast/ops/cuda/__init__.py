"""Launchers of the CUDA kernels (csrc/gpu, kernels/cuda): they allocate results and call the extension.

Only `nasfast.ops.registry` imports them.
"""
