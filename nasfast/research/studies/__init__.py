"""Studies: experiments with tables, figures and pass marks, each a folder with one entry in `registry`.

A study measures and returns a `report.StudyReport`; `run` carries it out, and `page` draws its page from its file.
"""
