"""How a pool of devices keeps deadlines on a virtual clock: rules, baselines and a bound. Pure.

Read in this order (modules of this package):

* `derived` - what a step takes, by degree
* `workloads` - what is asked for, and when
* `world` - one run: the event loop around a rule, and what it refuses
* `algorithm1`, `rounds`, `events` - TetriServe's rule, as published and at every event
* `rules` - all rules by name
* `results` - what runs come to, and how they are drawn
"""
