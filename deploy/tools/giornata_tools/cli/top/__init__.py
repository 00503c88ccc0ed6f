"""``giornata top``: the fleet at work, live, from its telemetry."""
