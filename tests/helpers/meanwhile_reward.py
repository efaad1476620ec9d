"""A reward function and an extension that show whether rewards are computed while rollouts continue.

In each process that acts, the last chunk of the first rollout waits for a call of ``meets_the_last_chunk``, which waits
for that chunk: if the process waited for rewards, or called for them after the rollout, neither would continue.
"""

import threading
from dataclasses import replace

from embodrl.hybrid_engines.rollout.native import NativeRolloutEngine
from embodrl.workers.workflows.workflow import ChunkWorkflow

CHUNKS = 4  # of a rollout of runs.TINY
PATIENCE_S = 60.0
began, acted = threading.Event(), threading.Event()
acts = 0


def _act(self, *args, _act=NativeRolloutEngine.act, **kwargs):
    global acts
    acts += 1
    if acts == CHUNKS:
        assert began.wait(PATIENCE_S), "no reward is computed while the rollout continues"
        acted.set()
    return _act(self, *args, **kwargs)


if NativeRolloutEngine.act.__name__ != "_act":
    NativeRolloutEngine.act = _act


def meets_the_last_chunk(episode):
    began.set()
    assert acted.wait(PATIENCE_S), "the rollout waits for a reward"
    return everything(episode) if episode.images is not None else float(len(episode.frames))


class OneEndsEarly(ChunkWorkflow):
    """Ends the first episode of a process that is trained on after one chunk."""

    ended = False

    async def run_episode(self, engine, env, task):
        if task.keep_frames and not self.ended:
            self.ended, task = True, replace(task, max_chunks=1)
        return await super().run_episode(engine, env, task)


def everything(episode):
    """Return a number that depends on all that an episode has."""
    seen = (episode.images, episode.start_images, episode.actions, episode.states, episode.policy_version)
    return sum(float(part.double().mean()) for part in seen) + len(episode.instruction)
