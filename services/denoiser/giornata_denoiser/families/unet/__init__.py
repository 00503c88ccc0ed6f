"""UNet checkpoints: Stable Diffusion 1, 2 and XL, plain and inpainting. The batch of their network is tiles."""
