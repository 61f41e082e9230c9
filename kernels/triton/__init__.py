"""Triton kernels of frozen convolution, trainable BatchNorm and activation; installed as nasfast._triton.

Nothing here imports the rest of the package. The launchers are in nasfast/ops/triton.
"""
