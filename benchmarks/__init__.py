"""Measurements of nasfast: one `bench_*` program per subject, run from the root of the checkout by `python -m`.

They share `harness`, `steps` and `captures`. `gpu/` is the plan that `gpu.sh` runs, `gpu_step` needs no GPU.
"""
