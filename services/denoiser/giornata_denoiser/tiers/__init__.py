"""What recordings and adapters have in common: tiers of limited size, each loaded from the one below."""
