"""Where everything of a run is: solved once, in the driver, and sent to every process in its start message.

``grammar`` reads placements, ``topology`` reads this machine, ``solver`` makes the ``Deployment`` of both. Imports no
torch, and of the configuration only types: the rules of the configuration read a deployment.
"""

from __future__ import annotations

from embodrl.deployment.grammar import COMPONENTS, PlacementError, ProcessPlace
from embodrl.deployment.solver import Deployment, Solution, solve
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
    "read_machine",
    "solve",
]
