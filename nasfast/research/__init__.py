"""Methods and studies of other papers: cells, NASI, zero-cost scores, and signals at initialisation.

May import every package. No other package imports it: `nasfast.extensions` names what it adds to the registries of
spaces, scores and commands, and a module is imported when its entry is used. Begin there.
"""
