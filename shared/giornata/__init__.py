"""What Giornata's services share.

* :mod:`giornata.wire` - the wire contract
* :mod:`giornata.bus`, :mod:`giornata.records`, :mod:`giornata.blobs` - NATS, its key-value records, the blob store
* :mod:`giornata.scheduling`, :mod:`giornata.planning` - placing rows on workers, planning a step's loads; both pure
* :mod:`giornata.client` - Giornata from another application, over NATS
* :mod:`giornata.config`, :mod:`giornata.runtime` - a service's settings and its process
"""

__version__ = "0.1.0"
