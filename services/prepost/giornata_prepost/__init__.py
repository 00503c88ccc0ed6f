"""Prepost: everything that happens to a picture before and after the denoiser.

Its floors, lowest first:

* :mod:`giornata_prepost.images` - pixels, masks and boxes: what the stages without a model compute
* :mod:`giornata_prepost.families` - autoencoder and text encoders of model families
* :mod:`giornata_prepost.worker_pools` - the processes and the thread that both run in
* :mod:`giornata_prepost.service` - the endpoints
"""
