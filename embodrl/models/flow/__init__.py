"""What families of flow policies share: the stochastic chain, its losses, and networks that several of them have."""
