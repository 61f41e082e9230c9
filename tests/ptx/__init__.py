"""An interpreter of the PTX that nvcc makes of the CUDA kernels; docs/method.md says what it checks."""
