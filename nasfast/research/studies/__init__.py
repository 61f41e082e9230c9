"""Studies: what a paper claims, measured. Each is a file that reads like the method; `commands` lists them.

A study reports in a `notebook.Notebook`: sentences, tables, pass marks and figures, on the screen and in files.
"""
