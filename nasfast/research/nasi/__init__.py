"""NASI: architectures chosen at initialisation, in layer-wise spaces and in spaces of cells.

`score` has the score of a network, `search` the algorithm, `spaces` what differs between both kinds of spaces.
"""
