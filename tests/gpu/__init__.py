"""A campaign of tests and measurements on a GPU: ``python -m tests.gpu``, or ``make gpu``."""
