"""The rules of intake: forms, envelopes, tenants, idempotency. Pure."""
