"""The plan for a machine with a CUDA GPU, which `benchmarks/gpu.sh` starts.

`plan` runs the parts. They are `build`; `system` with `micro.cu`; `proofs` for parity and bits; `per_launch`; `parts` for
the step and random paths; `tools` for sanitizer and ncu; and pytest with the plugin `rows`. `report` writes their page.
"""
