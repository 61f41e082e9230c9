"""Triton's interpreter, with bfloat16 as a GPU has it.

As of Triton 3.9 it keeps bfloat16 as the bits in a uint16, cuts digits off where a GPU rounds, and multiplies the bits
themselves in `tl.dot`. Results in bfloat16 mean something only with this.
"""

import numpy as np


def repair_bfloat16() -> None:
    """Patch the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def rounded(data, source, target, rounding_mode):
        if source == tl.float32 and target == tl.bfloat16:
            bits = data.view(np.uint32)
            nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
            return np.where(np.isnan(data), (bits >> 16) | 0x40, nearest).astype(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return convert(data, source, target, rounding_mode)

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            rounded(handle.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
        )

    def exact_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_dot = exact_dot
