"""Giornata's wire contract and what at least two of its services use.

Read in this order, it is the protocol's manual:

* :mod:`giornata.requests` - what an application asks for
* :mod:`giornata.jobs` - what becomes of it: the job, its rows, its record
* :mod:`giornata.messages` - the questions services ask each other
* :mod:`giornata.events` - what is told while a job runs
* :mod:`giornata.workers` - what a service tells of itself
* :mod:`giornata.errors` - every way an edit can fail, with stable codes
* :mod:`giornata.subjects` - where each message travels
* :mod:`giornata.codec` - how it is written down

and the edge that services share: :mod:`giornata.config`, :mod:`giornata.bus`, :mod:`giornata.records`,
:mod:`giornata.blobs`, :mod:`giornata.tensors`, :mod:`giornata.runtime`, :mod:`giornata.client`;
and the program ``giornata``: :mod:`giornata.cli`, with its load generator :mod:`giornata.loadgen`.
"""

__version__ = "0.1.0"
