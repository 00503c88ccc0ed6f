"""The LoRA store, which brings adapters from where they are kept to the denoisers that need them.

Today it is discovered, watched and drained like every other service, and refuses the work itself.
"""
