"""A model of a training step on a GPU, computed without one from the machine code of every CUDA kernel."""
