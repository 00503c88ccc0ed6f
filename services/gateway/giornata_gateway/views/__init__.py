"""Views: the answers to clients, made from records and telemetry. Pure."""
