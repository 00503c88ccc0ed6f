"""The rules of intake: forms, envelopes, tenants, admission, idempotency. Pure."""
