"""The yardstick of UNets: a small Stable Diffusion inpainting model that paints the scenes which fresco paints."""
