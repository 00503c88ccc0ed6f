"""The data path of steps: a denoiser asks a ControlNet instance for samples, which arrive in its own memory.

`client` is the denoiser's end. `listener` is the instance's, and hands out what is asked (`asking`). `slabs` is the
memory, `ring` its accounting. `frames` are the messages of :mod:`giornata.wire.control_steps` as bytes, which travel
over `sockets`.
"""
