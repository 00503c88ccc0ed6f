"""The simulator of ``giornata simulate``: the live system's own scheduling code on a virtual clock. Pure.

Read in this order (modules of this package):

* `machines`, `cluster` - what a worker is: costs, places, memory
* `jobs` - what clients ask for
* `processors`, `tiers`, `steps`, `worker` - the parts that are simulated
* `simulator` - one run: those parts around :mod:`giornata.scheduling`
* `results`, `bound` - what a run comes to, and how far it is from the best
* `scenario`, `plots` - the runs of one setting, how many workers it needs, how it is drawn
"""
