"""A batch that several processes compute."""
