"""What nvcc made of the CUDA kernels, and what a call launches."""
