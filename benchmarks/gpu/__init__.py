"""The ten-minute plan for a machine with a CUDA GPU, which `benchmarks/gpu.sh` starts.

`plan` runs the parts, `parts`, `system` and `rows` are what they run, and `summary` writes the page of their results.
"""
