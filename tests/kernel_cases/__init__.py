"""Cases of the kernels: inputs of every operator and the check of its results against float64.

The tests of every backend and of every instruction set use them. They need no extension.
"""
