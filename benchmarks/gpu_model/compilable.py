"""Import this module before nasfast: Triton kernels can then be compiled, and their operators accept CPU tensors.

Triton decides when a kernel is defined whether it is compiled or interpreted, so interpretation must be off by then.
nasfast passes CPU tensors to its Triton operators only if TRITON_INTERPRET is 1, so the variable must be 1 afterwards.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import triton

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"
