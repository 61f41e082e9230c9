"""Triton kernels of BatchNorm, activation and residual; installed as nasfast._triton.

Nothing here imports the rest of the package. The launchers are in nasfast/ops/triton.py.
"""
