"""Import this before nasfast: its Triton kernels can then be compiled, and its operators take CPU tensors.

Kernels are functions to compile or functions to interpret from the moment they are defined, and nasfast gives CPU
tensors to the Triton operators only where it believes in the interpreter.
"""

import os

os.environ["TRITON_INTERPRET"] = "0"

import triton

triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = False
os.environ["TRITON_INTERPRET"] = "1"
