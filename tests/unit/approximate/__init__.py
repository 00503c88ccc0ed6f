"""The approximate prompt cache's pure core."""
