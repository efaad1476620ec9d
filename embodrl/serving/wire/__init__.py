"""What policy servers and their clients exchange: bytes to bounded objects, and objects to observations. No torch."""

TOKEN_VARIABLE = "EMBODRL_TOKEN"
"""Environment variable with the token that a server asks for."""
