"""Which part of a run's environments a rollout process has.

Legend: R rollout processes, B environments over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodrl.config.schema import Config


@dataclass(frozen=True)
class Share:
    """Neighbouring rows, as many as every other process has.

    Attributes:
        rank: of the rollout process.
        count: R.
    """

    rank: int = 0
    count: int = 1

    def rows(self, total: int) -> slice:
        """Return this process's rows of ``total``, a multiple of R."""
        size = total // self.count
        return slice(self.rank * size, (self.rank + 1) * size)


WHOLE = Share()


def share_config(config: Config, share: Share) -> Config:
    """Return the configuration of a run of this share alone: its environments, simulator processes and threads."""
    count = share.count
    if count == 1:
        return config
    env, cluster = config.env, config.cluster
    parts = {
        "num_processes": env.num_processes // count,
        "train": env.train.model_copy(update={"total_num_envs": env.train.total_num_envs // count}),
        "eval": env.eval.model_copy(update={"total_num_envs": env.eval.total_num_envs // count}),
    }
    return config.model_copy(update={"env": env.model_copy(update=parts), "cluster": cluster})
