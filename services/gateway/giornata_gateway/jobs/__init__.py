"""Jobs between the doors and the router: prepared, submitted, shared, awaited, followed; templates are registered."""
