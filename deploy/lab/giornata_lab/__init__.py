"""What measures, trains and judges Giornata, beside what serves: nothing that serves imports it.

* :mod:`giornata_lab.cli` - the commands that come with it: ``demo``, ``quality``, ``bench``, ``simulate``
* :mod:`giornata_lab.demo` - edits through the whole system, compared with diffusers
* :mod:`giornata_lab.loadgen` - workloads as in production, and their reports
* :mod:`giornata_lab.simulation` - a cluster on a virtual clock, with the policies that serve
* :mod:`giornata_lab.quality` - how well a model's edits hit what was asked
* :mod:`giornata_lab.baseline` - diffusers' own pipeline behind the same API
* :mod:`giornata_lab.model` - the models that ship: their scenes, their training, their judges
"""
