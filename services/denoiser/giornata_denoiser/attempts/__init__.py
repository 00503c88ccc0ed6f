"""Attempts at jobs, from acceptance to report."""
