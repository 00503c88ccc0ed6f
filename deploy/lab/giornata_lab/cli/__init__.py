"""Commands of the program ``giornata`` that come with the lab.

* `workload` - which edits arrive: options that ``bench`` and ``simulate`` share
* `system` - ``demo`` and ``quality``, around :mod:`giornata_lab.demo` and :mod:`giornata_lab.quality`
* `bench` - ``bench serve`` and ``bench baseline``: options, what follows from them and the runs, around
  :mod:`giornata_lab.loadgen`
* `simulate` - ``simulate``, around :mod:`giornata_lab.simulation`
"""
