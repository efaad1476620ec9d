"""Shared parts of flow policies: the stochastic chain, its losses, and common networks."""
