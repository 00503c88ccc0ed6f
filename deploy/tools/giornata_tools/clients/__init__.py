"""Clients of the command line: HTTP and NATS, with their addresses and answers."""
