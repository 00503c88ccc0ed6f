"""The built-in model: a small checkpoint with random weights, and how it is built."""
