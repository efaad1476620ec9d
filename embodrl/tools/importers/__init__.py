"""Importers of other systems' configurations."""
