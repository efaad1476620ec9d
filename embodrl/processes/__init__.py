"""Child processes and what they exchange with their parent: one supervisor, one frame, one codec.

Simulators (``envs.pool``) and workers of a group (``scheduler``) are both built on it. Needs numpy and the standard
library only, and Python 3.10: a simulator may run in its own interpreter.
"""
