"""A NATS server in memory, below the client library: production's connections, streams and buckets are the real ones.

It speaks the protocol of nats-server 2.15 to clients of its own process, without a socket, a process or a thread, so
that a virtual clock holds for the server, too. `tests/contract/nats_world` holds it to a real server.
"""
