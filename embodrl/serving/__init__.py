"""Policy servers: one core that batches the requests of all connections, one file per protocol, and clients."""
