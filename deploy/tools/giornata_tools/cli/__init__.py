"""The command line ``giornata``: edit a picture, start the system, look at the fleet, find what is missing.

Read in this order:

* `__main__` and `app` - the program and its commands, each imported when it runs
* `connecting` and `extras` - what several commands need: addresses, and packages that not all of them need
* `edit` - ``edit``: with `parameters` (its options, made from the request's type), `outputs` (where pictures go) and
  `report` (what is left behind), around :mod:`giornata_tools.doors`
* `local` - ``up``, ``demo``, ``quality`` and ``profile``: options of :mod:`giornata_tools.launcher` and its siblings
* `operate` - ``status``, ``keys`` and ``quarantine``
* `bench` - ``bench serve``: its options, how they are read, what follows from them and the runs, around
  :mod:`giornata_tools.loadgen`; ``bench baseline``: the server to compare with
* `simulate` - ``simulate``, around :mod:`giornata_tools.simulation`
* `doctor` - ``doctor`` and its checks
"""
