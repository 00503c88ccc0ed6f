"""LoRAs in the denoiser: files from the LoRA store, their pages in memory, and sets of them on the device."""
