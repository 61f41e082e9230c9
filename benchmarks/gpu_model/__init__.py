"""A model of a training step on a GPU, computed without one from the machine code of every Triton launch.

Programs: the model itself (`python -m benchmarks.gpu_model`), and in the same way `.aot`, `.traffic`, `.saved`
and `.host_cost`.
"""
