"""The data path of steps: a denoiser asks a ControlNet instance for samples, which arrive in its own memory.

`client` is the denoiser's end, `server` the instance's, `slabs` the memory between them, and `messages` their words.
"""
