"""The placement of a run's processes: solved once, in the driver, and sent to each process in its start message.

``grammar`` reads placements, ``topology`` reads this machine, ``solver`` makes the ``Deployment`` from both. Imports no
torch, and only types of the configuration, whose rules read a deployment.
"""

from __future__ import annotations

from embodrl.deployment.automatic import iteration_cost
from embodrl.deployment.grammar import COMPONENTS, PlacementError, ProcessPlace
from embodrl.deployment.solver import Deployment, Solution, solutions, solve
from embodrl.deployment.topology import Gpu, Machine, Topology, read_machine

__all__ = [
    "COMPONENTS",
    "Deployment",
    "Gpu",
    "Machine",
    "PlacementError",
    "ProcessPlace",
    "Solution",
    "Topology",
    "iteration_cost",
    "read_machine",
    "solutions",
    "solve",
]
