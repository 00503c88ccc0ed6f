"""How a pool of devices keeps deadlines on a virtual clock: rules, baselines and a bound. Pure.

Read in this order: `workloads` (pictures and step times), `world` (one run, and what it refuses), `rules` (ours, and
TetriServe's as published and at every event, and fixed degrees), `bound`, `fit` (step times that agree with the paper).
"""
