"""The data path of steps: a denoiser asks a ControlNet instance for samples, which arrive in its own memory.

`client` is the denoiser's end, `listener` the instance's. `slabs` is the memory, `ring` its accounting. `frames` are
the messages of :mod:`giornata.wire.control_steps` as bytes, which travel over `sockets`.
"""
