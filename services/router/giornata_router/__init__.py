"""The router: accepts jobs durably and walks each from inspection to picture.

* :mod:`~giornata_router.service` - works while it holds the lease of :mod:`~giornata_router.leadership`
* :mod:`~giornata_router.job_queue` - accepted jobs; :mod:`~giornata_router.job_runner` - one job
* :mod:`~giornata_router.denoise_stage`, :mod:`~giornata_router.dispatch` - rows at workers
* :mod:`~giornata_router.prepost` - the stages beside denoising
* :mod:`~giornata_router.rules` - what a record becomes and when a job ends
"""
