"""The NASI study: how well NASI's score predicts accuracy, and architectures that it chooses at initialisation.

It runs the algorithm of `nasfast.research.nasi` and reports on it; docs/nasi.md.
"""
