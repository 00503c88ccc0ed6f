"""Webhooks of jobs: signed, sent until they are taken or given up, by any gateway."""
