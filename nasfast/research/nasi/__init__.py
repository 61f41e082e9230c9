"""NASI: architectures chosen at initialisation, in layer-wise spaces and in spaces of cells.

`score` has the score of a network, `search` the algorithm, `layers` and `cells` the supernets of both kinds of spaces.
"""
