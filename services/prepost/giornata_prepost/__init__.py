"""Prepost: everything that happens to a picture before and after the denoiser.

Pure and free of torch, run in a pool of processes:

* :mod:`giornata_prepost.pictures` - untrusted bytes to upright 8-bit pixels, and back to PNG, JPEG, WebP
* :mod:`giornata_prepost.geometry` - the model's and the output's size
* :mod:`giornata_prepost.masks` - which pixels are edited, how strongly, and which tokens that touches
* :mod:`giornata_prepost.paste` - the painted picture into the original
* :mod:`giornata_prepost.inspection`, :mod:`giornata_prepost.finishing` - the two stages made of these
* :mod:`giornata_prepost.pool` - the processes that they run in

With torch, over the checkpoint's own diffusers pipeline: :mod:`giornata_prepost.encoding`, in
:mod:`giornata_prepost.model_thread`.
"""
