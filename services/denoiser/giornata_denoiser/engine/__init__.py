"""One step for all running rows: plan, compute, settle."""
