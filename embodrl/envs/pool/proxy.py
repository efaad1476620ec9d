"""SimulatorManager: requests to a pool's simulators as methods, by the names of RLinf's EnvManager."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from embodrl.envs.base import VectorEnv
from embodrl.envs.pool.pool import EnvPool
from embodrl.errors import EnvError


class SimulatorManager:
    """Simulators of a pool, whose requests are methods.

    ``manager.NAME(...)`` sends the request NAME of ``VectorEnv.call`` to every simulator process, which work in
    parallel, and returns their answers in a list. Simulators may add requests of their own to ``VectorEnv.REQUESTS``;
    their arguments are passed by name. Names that are no requests but methods of the pool, such as ``reset`` and
    ``step``, are the pool's.

    Args:
        pool: started, or not yet.
    """

    def __init__(self, pool: EnvPool) -> None:
        self.pool = pool

    def start_simulator(self) -> None:
        """Start the processes; after ``stop_simulator``, continue there bit-exactly."""
        self.pool.start()

    def stop_simulator(self) -> None:
        """Save the states and end the processes; ``start_simulator``, or the next request, brings them back."""
        self.pool.offload()

    def get_state(self) -> list[bytes]:
        """Return the state of every process."""
        return self.pool.get_state()

    def load_state(self, state: Sequence[bytes]) -> None:
        """Continue bit-exactly from a state of ``get_state``; CheckpointError if it is of other environments."""
        self.pool.set_state(state)

    def __enter__(self) -> SimulatorManager:
        self.start_simulator()
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()

    def __getattr__(self, name: str) -> Any:
        """Return the method that sends a request.

        The method raises EnvError for a name that is unknown to the simulators, naming the nearest one, and for
        arguments that can't be sent.
        """
        if name.startswith("_"):  # of Python's protocols, such as copy
            raise AttributeError(name)
        if name not in VectorEnv.REQUESTS and hasattr(EnvPool, name):
            return getattr(self.pool, name)
        return self._request(name)

    def _request(self, name: str) -> Callable[..., list[object]]:
        def request(*positional: object, **named: object) -> list[object]:
            found = _by_name(name, positional)
            if twice := sorted(found.keys() & named.keys()):
                message = f"the request '{name}' gets '{twice[0]}' by position and by name"
                raise EnvError(message, "give it once", code="env-arguments")
            return self.pool.call(name, {**found, **named})

        return request


def _by_name(request: str, arguments: Sequence[object]) -> dict[str, object]:
    """Return positional arguments of a request by name; EnvError if the request does not have as many."""
    if not arguments:
        return {}
    if request not in VectorEnv.REQUESTS:
        raise EnvError(
            f"the request '{request}' gets arguments by position, whose names are not known here",
            f"pass them by name: {request}(name=value)",
            code="env-arguments",
        )
    _, *names = inspect.signature(getattr(VectorEnv, request)).parameters
    if len(arguments) > len(names):
        known = ", ".join(names) or "none"
        raise EnvError(
            f"the request '{request}' gets {len(arguments)} arguments, and has {len(names)}",
            f"its arguments: {known}",
            code="env-arguments",
        )
    return dict(zip(names, arguments, strict=False))
