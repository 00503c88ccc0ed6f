"""ControlNets that a denoiser computes itself."""
