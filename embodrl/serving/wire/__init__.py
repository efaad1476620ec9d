"""Messages between policy servers and clients: bytes to size-limited objects, and objects to observations. No torch."""

TOKEN_VARIABLE = "EMBODRL_TOKEN"
HOSTS_TOKEN_VARIABLE = "EMBODRL_HOSTS_TOKEN"
"""Token of the env servers that a run has started itself."""
"""Environment variable with the token for the server."""
