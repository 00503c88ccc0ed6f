"""The rules by which requests are read and let in: forms, envelopes, tenants, idempotency, addresses. Pure."""
