"""The router: accepts jobs durably and walks each from inspection to picture.

* :mod:`service` - leads while it holds the lease; :mod:`queue` - accepted jobs; :mod:`walk` - one job
* :mod:`dispatch`, :mod:`computing` - rows at workers; :mod:`prepost` - the stages beside denoising
* :mod:`rules` - what a record becomes and when a job ends
"""
