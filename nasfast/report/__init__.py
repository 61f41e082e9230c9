"""Figures, the one-page HTML report of a run directory, and the page that compares runs.

May import `search` and all before it. Begin with `page`.
"""
