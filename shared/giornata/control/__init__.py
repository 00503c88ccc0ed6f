"""ControlNets: networks that see a control image and add to what the blocks of a denoising network make."""
