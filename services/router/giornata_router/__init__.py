"""The router: accepts jobs durably and walks each from inspection to picture.

* :mod:`~giornata_router.service` - works while it holds the lease of :mod:`~giornata_router.leadership`
* :mod:`~giornata_router.job_queue` - accepted jobs, by :mod:`~giornata_router.admission`
* :mod:`~giornata_router.job_runner`, :mod:`~giornata_router.job_records` - one job and its record
* :mod:`~giornata_router.dispatch` - rows at workers
* :mod:`~giornata_router.prepost` - the stages beside denoising
"""
