"""Spellings of other systems for code that was written for them: ``compat.siirl`` and ``compat.verl``."""
