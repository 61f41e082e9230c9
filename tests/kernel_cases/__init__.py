"""Cases of the kernels: inputs of every operator and the check of its results against float64.

The tests of every backend and of every instruction set use them. They need no extension.
"""

IMAGE_OPERATORS = ("depthwise_conv2d", "mixed_bn", "pool_3x3", "squeeze_excite")
"""Operators of images with a module of this name here, which has CASES and `check_case(case, backend)`."""
