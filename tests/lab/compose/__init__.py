"""Images are built and the Compose files started, in a Docker engine of the tests' own: ``make compose-test``."""
