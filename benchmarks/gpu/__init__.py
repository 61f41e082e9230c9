"""The plan for a machine with a CUDA GPU, which `benchmarks/gpu.sh` starts.

`plan` runs the parts: `build`; `users` for what a user does first; `parts` for the step beside its peers; `proofs` for
parity and bits; `per_launch`, which also compares two builds; `tools` for sanitizer and ncu; and pytest with the plugin
`rows`. `report` writes their page.
"""
