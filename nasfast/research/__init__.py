"""Methods and studies of other papers: cells, NASI, zero-cost scores, and signals at initialisation.

This package imports the core. The core never imports it: `nasfast.extensions` names what it adds to the registries of
spaces, scores and commands, and a module is imported when its entry is used.
"""
