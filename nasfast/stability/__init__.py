"""A search repeated with several seeds: whether its ranking is stable, and whether its answer beats simple baselines.

`agreement` compares the tables of the seeds, `work` has the tasks, `run` runs them, `page` writes the report.
"""
