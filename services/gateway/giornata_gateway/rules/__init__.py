"""The rules by which requests are read and let in: forms of requests, adapters, tenants. Pure."""
