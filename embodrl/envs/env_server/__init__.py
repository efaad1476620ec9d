"""Simulators for runs on other machines: `embodrl env serve`, and what a run has in place of such a simulator."""
