"""Benchmarks of single operators: one table of cases, which pytest-benchmark times.

pytest benchmarks/ops [--size quick] [-k WORDS] [--benchmark-autosave] [--benchmark-compare]
"""
