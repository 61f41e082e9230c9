"""The moments study: well behaved or pathological at initialisation, in a paper's networks and in ours.

After A. Labatie, *Characterizing Well-Behaved vs. Pathological Deep Neural Networks*, ICML 2019; docs/moments.md.
"""
