"""NATS: connections, typed messages and endpoints, JetStream's streams, telemetry."""
