"""Robots: wall-clock time, limits of commands, and lerobot's Robot class."""
