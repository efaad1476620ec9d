"""A policy behind a server of openpi, GR00T or embodrl, evaluated in embodrl's environments."""
