"""What a file must be to be kept as a LoRA, and which file of a shared folder is whose. Pure."""
