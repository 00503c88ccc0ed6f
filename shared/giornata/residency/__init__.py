"""Residency in tiers of limited size, on links of limited bandwidth: recordings, adapters and ControlNets alike."""
