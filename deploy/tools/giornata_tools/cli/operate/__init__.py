"""Commands for operators: ``status``, ``keys`` and ``quarantine``."""
