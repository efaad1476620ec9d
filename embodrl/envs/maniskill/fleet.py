"""The scenes of one process: many scenes of one environment each on a CPU, one scene of many on a GPU.

On a CPU each scene keeps a journal of its resets and actions. PhysX carries history that no state dictionary shows
(contact caches, the order of pairs), so a scene is restored bit-exactly by rebuilding it and replaying the journal;
``rebuild`` empties the journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import numpy as np
from numpy.typing import NDArray

from embodrl.envs.experts import Expert, make_expert
from embodrl.envs.maniskill.sim import ManiSkillSim, evaluate, observe
from embodrl.envs.maniskill.types import SimOptions
from embodrl.errors import EnvError

if TYPE_CHECKING:
    from typing import Required  # not in Python 3.10, which simulators may use

_RESET = 0
_STEP = 1


class JournalArrays(TypedDict):
    """``kinds uint8[n]``, ``seeds int64[n_resets]`` and ``actions float32[n_steps,A]``."""

    kinds: NDArray[np.uint8]
    seeds: NDArray[np.int64]
    actions: NDArray[np.float32]


class SceneState(TypedDict):
    """State of a scene: row and task, its journal, and the mark, if any."""

    key: list[int]
    journal: JournalArrays
    mark: int | None


class FleetState(TypedDict, total=False):
    """Result of ``Fleet.get_state``: on a GPU the physics, on a CPU the scenes."""

    task_id: Required[NDArray[np.int32]]
    physics: dict[str, NDArray[np.float32]]
    scenes: list[SceneState]


class ActionJournal:
    """Resets and actions of one scene since it was built."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.seeds: list[int] = []
        self.actions: list[NDArray[np.float32]] = []

    def reset(self, seed: int) -> None:
        self.kinds.append(_RESET)
        self.seeds.append(seed)

    def step(self, action: NDArray[np.float32]) -> None:
        self.kinds.append(_STEP)
        self.actions.append(action.copy())

    def truncate(self, num_events: int) -> None:
        """Drop all but the first events."""
        num_resets = self.kinds[:num_events].count(_RESET)
        self.kinds = self.kinds[:num_events]
        self.seeds = self.seeds[:num_resets]
        self.actions = self.actions[: num_events - num_resets]

    def to_arrays(self) -> JournalArrays:
        actions = np.stack(self.actions) if self.actions else np.zeros((0, 0), np.float32)
        return {"kinds": np.array(self.kinds, np.uint8), "seeds": np.array(self.seeds, np.int64), "actions": actions}

    @staticmethod
    def replay(arrays: JournalArrays, sim: ManiSkillSim) -> ActionJournal:
        """Replay the journal on a new scene; return the new scene's journal."""
        journal = ActionJournal()
        seeds = iter(arrays["seeds"])
        actions = iter(arrays["actions"])
        for kind in arrays["kinds"]:
            if kind == _RESET:
                seed = next(seeds)
                sim.reset(np.array([seed]), np.zeros(1, np.int64))
                journal.reset(int(seed))
            else:
                action = next(actions)
                sim.advance(action[None])
                if sim.task.reward_keeps_state:
                    evaluate([sim], action[None])
                journal.step(action)
        return journal


class Fleet:
    """B environments over the scenes of this process; an environment gets one of ``tasks`` at each reset.

    ``sim_kwargs`` are keyword arguments of ManiSkillSim without task and num_envs.
    """

    def __init__(self, num_envs: int, tasks: tuple[str, ...], sim_kwargs: SimOptions) -> None:
        self.num_envs = num_envs
        self.tasks = tasks
        self.task_id = np.zeros(num_envs, np.int32)
        self._kwargs = sim_kwargs
        self._batched: ManiSkillSim | None = None
        self._sims: dict[tuple[int, int], ManiSkillSim] = {}
        self._journals: dict[tuple[int, int], ActionJournal] = {}
        self._marks: dict[tuple[int, int], int] = {}
        self._experts: list[Expert | None] = [None] * num_envs
        if sim_kwargs["sim_backend"] == "physx_cuda":
            if len(tasks) != 1:
                raise EnvError(
                    "physx_cuda simulates one task at a time",
                    "choose one task, or set env.sim_backend=physx_cpu",
                    code="physx-cuda",
                )
            (task,) = tasks
            self._batched = ManiSkillSim(task, num_envs, **sim_kwargs)
        else:
            for row in range(num_envs):
                self._sim(row)

    def any_sim(self) -> ManiSkillSim:
        """Return any scene, to query its spaces."""
        return self._batched or next(iter(self._sims.values()))

    def _sim(self, row: int) -> ManiSkillSim:
        """Return the scene of an environment and its current task (CPU), building it on first use."""
        key = (row, int(self.task_id[row]))
        if key not in self._sims:
            self._sims[key] = ManiSkillSim(self.tasks[key[1]], 1, **self._kwargs)
            self._journals[key] = ActionJournal()
        return self._sims[key]

    def _journal(self, row: int) -> ActionJournal:
        return self._journals[row, int(self.task_id[row])]

    def assign(self, rows: NDArray[np.int64], task_ids: NDArray[np.int32]) -> None:
        """Set the tasks of the next episodes."""
        self.task_id[rows] = task_ids
        for row in rows.tolist():
            self._experts[row] = None  # it belonged to another episode, possibly of another task

    def reset(self, rows: NDArray[np.int64], seeds: NDArray[np.int64]) -> None:
        """Start new episodes in ``rows``."""
        if self._batched is not None:
            self._batched.reset(seeds, rows)
            return
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self._sim(row).reset(np.array([seed]), np.zeros(1, np.int64))
            self._journal(row).reset(seed)

    def step(
        self, actions: NDArray[np.float32], running: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Execute ``actions float32[B,A]`` in the running rows; return dense reward and success, 0 elsewhere."""
        if self._batched is not None:
            self._batched.advance(actions)
            return evaluate([self._batched], actions)
        rows = np.flatnonzero(running)
        for row in rows.tolist():
            self._sim(row).advance(actions[row : row + 1])
            self._journal(row).step(actions[row])
        reward = np.zeros(self.num_envs, np.float32)
        success = np.zeros(self.num_envs, np.bool_)
        reward[rows], success[rows] = self._evaluate(rows, actions)
        return reward, success

    def dense_reward(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the normalised dense reward ``float32[len(rows)]`` of the current states."""
        if self._batched is not None:
            return evaluate([self._batched])[0][rows]
        return self._evaluate(rows, None)[0]

    def _evaluate(
        self, rows: NDArray[np.int64], actions: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return dense reward and success of ``rows`` (CPU) after ``actions[rows] float32[.,A]``."""
        reward = np.zeros(len(rows), np.float32)
        success = np.zeros(len(rows), np.bool_)
        tasks = self.task_id[rows]
        for task in np.unique(tasks):
            chosen = tasks == task
            sims = [self._sim(row) for row in rows[chosen].tolist()]
            reward[chosen], success[chosen] = evaluate(sims, None if actions is None else actions[rows[chosen]])
        return reward, success

    def render(self, rows: NDArray[np.int64], images: NDArray[np.uint8]) -> None:
        """Render the cameras into ``images uint8[B,V,H,W,3]``, in ``rows`` only."""
        if self._batched is not None:
            if len(rows):
                images[rows] = self._batched.images()[rows]
            return
        for row in rows.tolist():
            images[row] = self._sim(row).images()[0]

    def render_human(self, row: int) -> NDArray[np.uint8]:
        """Render the camera for people, ``uint8[H,W,3]``."""
        return self._batched.render_human()[row] if self._batched is not None else self._sim(row).render_human()[0]

    def state(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return ``float32[len(rows),S]``."""
        if self._batched is not None:
            return observe([self._batched])[rows]
        state = np.zeros((len(rows), self.any_sim().state_dim), np.float32)
        tasks = self.task_id[rows]
        for task in np.unique(tasks):
            chosen = tasks == task
            state[chosen] = observe([self._sim(row) for row in rows[chosen].tolist()])
        return state

    # -- experts ------------------------------------------------------------------------------------------------------

    def expert_reset(self, rows: NDArray[np.int64]) -> None:
        """Start scripted experts in ``rows``, whose episodes have just begun (CPU only)."""
        if self._batched is not None:
            raise EnvError("experts run on physx_cpu only", "set env.sim_backend=physx_cpu", code="physx-cuda")
        for row in rows.tolist():
            self._experts[row] = make_expert(self.tasks[self.task_id[row]])

    def expert_actions(self) -> NDArray[np.float32]:
        """Return the experts' actions ``float32[B,A]``, 0 in rows without one."""
        actions = np.zeros((self.num_envs, len(self.any_sim().action_low)), np.float32)
        for row, expert in enumerate(self._experts):
            if expert is not None:
                actions[row] = expert.act(self._sim(row).env)
        return actions

    # -- state --------------------------------------------------------------------------------------------------------

    def perturb(self, axis: str) -> None:
        """Perturb all episodes from now on along an axis (CPU only)."""
        self._kwargs["axis"] = axis
        self.rebuild()

    def rebuild(self) -> None:
        """Rebuild the scenes to discard their history (CPU only)."""
        if self._batched is not None:
            return
        self._marks = {}
        for key, sim in list(self._sims.items()):
            sim.close()
            self._sims[key] = ManiSkillSim(self.tasks[key[1]], 1, **self._kwargs)
            self._journals[key] = ActionJournal()

    def mark(self) -> None:
        """Remember the lengths of the journals."""
        self._marks = {key: len(journal.kinds) for key, journal in self._journals.items()}

    def rewind(self) -> None:
        """Truncate the journals to the mark."""
        for key, journal in self._journals.items():
            journal.truncate(self._marks.get(key, 0))

    def get_state(self) -> FleetState:
        if self._batched is not None:
            return {"task_id": self.task_id, "physics": self._batched.get_state()}
        scenes: list[SceneState] = [
            {"key": list(key), "journal": self._journals[key].to_arrays(), "mark": self._marks.get(key)}
            for key in self._sims
        ]
        return {"task_id": self.task_id, "scenes": scenes}

    def set_state(self, state: FleetState) -> None:
        """Restore the scenes; on a CPU by bit-exact replay."""
        self.task_id = state["task_id"].copy()
        if self._batched is not None:
            self._batched.set_state(state.get("physics", {}))
            return
        for sim in self._sims.values():
            sim.close()
        self._sims = {}
        self._journals = {}
        self._marks = {}
        for scene in state.get("scenes", []):
            row, task = scene["key"]
            if (mark := scene["mark"]) is not None:
                self._marks[row, task] = mark
            self._sims[row, task] = ManiSkillSim(self.tasks[task], 1, **self._kwargs)
            self._journals[row, task] = ActionJournal.replay(scene["journal"], self._sims[row, task])

    def get_scene(self, row: int) -> JournalArrays:
        """Return the journal of the scene of an environment and its current task (CPU only)."""
        if self._batched is not None:
            raise EnvError(
                "physx_cuda has no state of single environments", "set env.sim_backend=physx_cpu", code="physx-cuda"
            )
        return self._journal(row).to_arrays()

    def set_scene(self, row: int, journal: JournalArrays) -> None:
        """Rebuild the scene of an environment and its current task, and replay it bit-exactly (CPU only)."""
        if self._batched is not None:
            raise EnvError(
                "physx_cuda has no state of single environments", "set env.sim_backend=physx_cpu", code="physx-cuda"
            )
        key = (row, int(self.task_id[row]))
        if key in self._sims:
            self._sims.pop(key).close()
        self._journals[key] = ActionJournal.replay(journal, self._sim(row))

    def close(self) -> None:
        for sim in self._sims.values():
            sim.close()
        self._sims = {}
        self._journals = {}
        if self._batched is not None:
            self._batched.close()
