"""Studies: experiments that end in pass marks, tables and figures.

Each study has a folder of its own; `nasfast NAME` runs it.
"""
