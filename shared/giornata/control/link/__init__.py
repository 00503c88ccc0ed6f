"""The data path of steps: a denoiser asks a ControlNet instance for samples, which arrive in its own memory.

`client` is the denoiser's end, with its `steps`. `server` is the instance's. `slabs` is the memory, and `messages` are
those of :mod:`giornata.wire.controlnets`, in frames of :mod:`giornata.frames`.
"""
