"""Chains of convolution, BatchNorm and activation, which one call of an operator runs.

Read `call` first: it checks a call and gives it to a backend. `plan` decides what the stages are and where their
numbers lie, `limits` which of them the CUDA kernels run, and `autograd` is the registered operator. `cuda` has its
launchers of the CUDA kernels (csrc/gpu, kernels/cuda), and `static` chains on buffers of the caller, whose last
BatchNorm may be `deferred`.
"""
