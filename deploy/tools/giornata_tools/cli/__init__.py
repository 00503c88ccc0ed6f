"""The command line ``giornata``: edit a picture, start the system, look at the fleet, find what is missing.

Read in this order:

* `__main__` and `app` - the program and its commands, each imported when it runs
* `options`, `groups` and `extras` - what several commands share, and packages that not all of them need
* `edit` - ``edit`` and ``generate``: with `parameters` (options, made from the request's type), around
  :mod:`giornata_tools.clients`
* `system` - ``up`` and ``profile``, around :mod:`giornata_tools.launcher`
* `status` (with ``models``), `top`, `keys`, `lora`, `webhooks` and `quarantine` - for operators
* `doctor` and `doctor_checks`

What measures is in :mod:`giornata_lab.cli`: ``demo``, ``quality``, ``bench`` and ``simulate``.
"""
