"""Policy servers: one core that batches the requests of all connections, and one file per protocol."""
