"""Whether a ranking is worth following: a search repeated with several seeds, and samples of trained architectures.

`agreement` compares the tables of the seeds, `work` has the tasks, `run` runs them, `page` writes the report. `trained`
trains a sample of the space and compares every score with its accuracies.
"""
