"""The part of Giornata that its services share.

* :mod:`giornata.wire` - the wire contract
* :mod:`giornata.bus`, :mod:`giornata.records`, :mod:`giornata.blobs` - NATS, its key-value records, the blob store
* :mod:`giornata.scheduling`, :mod:`giornata.planning` - placing rows on workers, planning a step's loads
* :mod:`giornata.packed` - packed sequences of transformer blocks; needs torch
* :mod:`giornata.client` - Giornata from another application, over NATS
* :mod:`giornata.families`, :mod:`giornata.checkpoints` - what a checkpoint is, and where it comes from
* :mod:`giornata.config`, :mod:`giornata.runtime` - a service's settings and its process
* :mod:`giornata.deadlines` - how long a service waits, and when it tries again
* :mod:`giornata.tracing`, :mod:`giornata.logs` - spans and logs of a process
"""

__version__ = "0.1.0"
