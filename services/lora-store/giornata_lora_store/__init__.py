"""The LoRA store: brings adapters from where they are kept to the denoisers that need them.

Today it is discovered, watched and drained like every other service, and refuses the work itself; the refusal
travels to the caller as :class:`giornata.wire.errors.NotSupported`.
"""
