"""Policy servers: one core that batches requests across connections, one file per protocol, and clients."""
