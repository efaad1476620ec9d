"""Spellings of other systems for code written for them: ``compat.areal``, ``compat.siirl`` and ``compat.verl``."""
