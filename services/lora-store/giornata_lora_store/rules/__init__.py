"""Rules of LoRA files: what one must be to be kept, and which file of a shared folder is whose. Pure."""
