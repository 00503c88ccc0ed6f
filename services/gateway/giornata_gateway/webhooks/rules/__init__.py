"""Rules of webhooks: what is signed, where it may go, and when it is tried again. Pure."""
