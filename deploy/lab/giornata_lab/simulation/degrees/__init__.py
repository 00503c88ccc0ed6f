"""How a pool of devices keeps deadlines on a virtual clock: rules, baselines and a bound. Pure.

Read in this order: `step_times`, `workloads`, `world` (one run, and what it refuses), `baselines` (TetriServe's rule,
as published and at every event, and fixed degrees), `rules` (all of them by name), `bound`, `fit` (step times that
agree with the paper).
"""
