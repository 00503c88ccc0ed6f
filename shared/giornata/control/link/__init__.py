"""The data path of steps: a denoiser asks a ControlNet instance for samples, which arrive in its own memory.

`client` is the denoiser's end, with its `steps`. `server` is the instance's. `slabs` is the memory, and `sockets` carry
the messages of :mod:`giornata.wire.controlnets`.
"""
