"""The models that come with the project: fresco, its data and its training; small ones of random weights for tests."""
