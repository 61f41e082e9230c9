"""Triton kernels of frozen convolution, trainable BatchNorm and activation; installed as nasfast._triton.

Nothing here imports the package. The launcher is nasfast/ops/triton/conv.py.
"""
