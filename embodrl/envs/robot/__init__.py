"""Robots: wall-clock time, command limits, and lerobot's Robot class."""
