"""The LoRA store: brings adapters from where they are kept to the denoisers that need them."""
