"""Launchers of the Triton kernels (kernels/triton): they choose tiles, allocate outputs and start the kernels.

Only `nasfast.ops.registry` imports them, and only where Triton can run.
"""
