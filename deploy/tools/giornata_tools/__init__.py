"""The tools around Giornata's services: the program ``giornata`` and what it runs.

* :mod:`giornata_tools.cli` - the commands
* :mod:`giornata_tools.launcher` - the whole system on one machine, and the demo
* :mod:`giornata_tools.loadgen` - workloads as in production, and their reports
* :mod:`giornata_tools.simulation` - a cluster on a virtual clock
* :mod:`giornata_tools.quality` - how well a model's edits hit what was asked
* :mod:`giornata_tools.baseline` - diffusers' own pipeline behind the same API
* :mod:`giornata_tools.model` - the small model that ships: its scenes and its training
"""
