"""Templates: which one an edit takes from, when it is recorded, where it is kept."""
