"""What recordings, adapters and ControlNets have in common: tiers of limited size, each loaded from the one below."""
