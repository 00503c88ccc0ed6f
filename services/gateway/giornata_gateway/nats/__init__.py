"""The NATS door: edits by request and reply."""
