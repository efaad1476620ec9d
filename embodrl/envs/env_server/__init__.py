"""Simulators for runs on other machines: `embodrl env serve`, and the run's side of such a simulator."""
