"""What clients are told, made from records and telemetry. Pure."""
