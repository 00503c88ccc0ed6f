"""Small stand-ins for services, held to the wire contract: they speak the same messages over a real NATS server."""
