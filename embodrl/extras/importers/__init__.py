"""Configurations of other systems."""
