"""What benchmarks compute with: models, rows, the engine, and the baselines beside it."""
