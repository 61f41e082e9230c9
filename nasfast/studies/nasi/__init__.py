"""The NASI study: what NASI's score knows about accuracy, and searches of any space.

It runs the algorithm and reports on it; the algorithm lives elsewhere.
"""

from nasfast.studies.nasi import config, figures
