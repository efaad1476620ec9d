"""Simulator states in checkpoints, with the EnvSpec they were taken with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from embodrl.envs.pool.transport import spec_from_dict, spec_to_dict
from embodrl.errors import CheckpointError, EnvError, MessageError
from embodrl.fields import Fields
from embodrl.processes.codec import decode, encode
from embodrl.types import EnvSpec

_MAGIC = b"embodrl simulator state 1\n"


def pack_states(specs: Sequence[EnvSpec], states: Sequence[bytes]) -> list[bytes]:
    """Return the states of a pool's processes, each with the EnvSpec of its process."""
    pairs = zip(specs, states, strict=True)
    return [_MAGIC + encode({"spec": spec_to_dict(spec), "state": state}) for spec, state in pairs]


def unpack_states(specs: Sequence[EnvSpec], packed: Sequence[bytes]) -> list[bytes]:
    """Return the states of ``pack_states``, one per process, which must match the EnvSpecs of the continuing processes.

    Raises CheckpointError if they are damaged or of other environments, naming the differing settings.
    """
    saved: list[EnvSpec] = []
    states: list[bytes] = []
    for content in packed:
        try:
            fields = Fields(decode(memoryview(content)[len(_MAGIC) :]), "a simulator's state", CheckpointError)
            saved.append(spec_from_dict(fields.fields("spec").content))
            state = fields.content["state"]
        except (MessageError, EnvError, KeyError) as error:
            raise CheckpointError(
                f"a simulator's state is damaged: {error}", "resume from another checkpoint", code="checkpoint-damaged"
            ) from error
        if not isinstance(state, bytes):
            raise CheckpointError(
                "a simulator's state is not bytes", "resume from another checkpoint", code="checkpoint-damaged"
            )
        states.append(state)
    # Compared as a whole: the pool takes one EnvSpec for all its processes.
    _check(_total(saved), _total(specs))
    return states


def _total(specs: Sequence[EnvSpec]) -> EnvSpec:
    return replace(specs[0], num_envs=sum(spec.num_envs for spec in specs))


def _check(saved: EnvSpec, present: EnvSpec) -> None:
    """Raise if an environment can't continue from a state because rows, images or tasks differ."""
    cameras = [
        ", ".join(f"{camera.name} {camera.height}x{camera.width}" for camera in spec.cameras)
        for spec in (saved, present)
    ]
    pairs = {
        "environments (env.train.total_num_envs)": (saved.num_envs, present.num_envs),
        "cameras (env.cameras)": tuple(cameras),
        "numbers of the state (env.include_state)": (saved.state_dim, present.state_dim),
        "numbers of an action": (saved.action_dim, present.action_dim),
        # Tasks are saved as indices; appending tasks changes none.
        "tasks (env.tasks)": (", ".join(saved.tasks), ", ".join(present.tasks[: len(saved.tasks)])),
    }
    differences = [
        f"{name}: {before} in the checkpoint, {now} now" for name, (before, now) in pairs.items() if before != now
    ]
    if differences:
        raise CheckpointError(
            "the simulators of the checkpoint differ from this run's: " + "; ".join(differences),
            "resume with the settings of the checkpoint, or start a new run from its policy (model.path)",
            code="env-state-mismatch",
        )
