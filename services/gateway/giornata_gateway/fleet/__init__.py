"""The fleet as this gateway hears it, and the metrics that Prometheus scrapes."""
