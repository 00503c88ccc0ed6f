"""Plans of placement: which adapters each host and each device should have. Pure."""
