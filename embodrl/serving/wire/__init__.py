"""Messages between policy servers and clients: bytes to size-limited objects, and objects to observations. No torch."""

TOKEN_VARIABLE = "EMBODRL_TOKEN"
"""Environment variable with the token for the server."""
