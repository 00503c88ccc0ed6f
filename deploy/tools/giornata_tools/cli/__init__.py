"""The command line ``giornata``: edit a picture, start the system, look at the fleet, find what is missing.

Read in this order:

* `__main__` and `app` - the program and its commands, each imported when it runs
* `options` and `extras` - options that several commands share, and packages that not all of them need
* `edit` - ``edit``: with `parameters` (its options, made from the request's type) and `delivery` (where pictures go and
  what is told), around :mod:`giornata_tools.clients`
* `system` and `profile` - ``up`` and ``profile``, around :mod:`giornata_tools.launcher`
* `status`, `keys` and `quarantine` - for operators
* `doctor` - ``doctor`` and its checks

What measures is in :mod:`giornata_lab.cli`: ``demo``, ``quality``, ``bench`` and ``simulate``.
"""
