"""Observability: what one edit does in every service, as OpenTelemetry spans."""
