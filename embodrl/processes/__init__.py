"""Child processes and their communication with the parent: one supervisor, one frame format, one codec.

Simulators (``envs.pool``) and workers of a group (``scheduler``) both build on it. Needs only numpy and the standard
library, and Python 3.10, since a simulator may run in its own interpreter.
"""
