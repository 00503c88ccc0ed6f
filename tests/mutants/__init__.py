"""Small faults put into the code one at a time: which the tests notice, and which pass."""
