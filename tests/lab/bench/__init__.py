"""Benchmarks that stand on the tests' fakes; ``python -m tests.lab.bench``, or ``make bench``, runs the lab's, too."""
