"""What policy servers and their clients exchange: bytes to bounded objects, and objects to observations. No torch."""
