"""Moments of signal and noise in deep networks, which tell at initialisation whether a network is well behaved.

The theory is that of A. Labatie, *Characterizing Well-Behaved vs. Pathological Deep Neural Networks*, ICML 2019; see
docs/moments.md.
"""
