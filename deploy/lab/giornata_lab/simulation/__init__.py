"""The simulator of ``giornata simulate``: the live system's own scheduling code on a virtual clock. Pure.

Read in this order (modules of this package):

* `machines` - what a worker is: costs, places, memory
* `jobs` - what clients ask for
* `processors`, `steps`, `worker` - the parts that are simulated
* `simulator` - one run: those parts around :mod:`giornata.scheduling`
* `results`, `bound` - what a run comes to, how it is drawn, and how far it is from the best
* `scenario` - the runs of one setting, and how many workers it needs
"""
