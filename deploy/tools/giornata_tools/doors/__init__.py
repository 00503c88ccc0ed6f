"""Ways to hand in an edit: HTTP and NATS, with their addresses and answers."""
