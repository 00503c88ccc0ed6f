"""Options of the benchmarks, and how they tell what they found."""
