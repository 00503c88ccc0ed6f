"""The image work, free of torch, run in a pool of processes. Pure.

* :mod:`giornata_prepost.images.pictures` - untrusted bytes to upright 8-bit pixels, and back to PNG, JPEG, WebP
* :mod:`giornata_prepost.images.geometry` - the model's and the output's size
* :mod:`giornata_prepost.images.masks` - which pixels are edited, how strongly, and which tokens that touches
* :mod:`giornata_prepost.images.paste` - the painted picture into the original
* :mod:`giornata_prepost.images.stages` - inspection and finishing, which are made of these
"""
