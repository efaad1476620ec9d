"""Every algorithm on every engine at the smallest size: the first numbers are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from runs import TINY, embodrl

pytestmark = [pytest.mark.slow, pytest.mark.long]

TWO = (
    "actor=fsdp",
    "cluster.device=cpu",
    "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}",
)
ENGINES = {"native": (), "fsdp": TWO, "tensor_parallel": (*TWO, "actor.tensor_parallel_size=2")}
SHORT = ("runner.max_iterations=2", "runner.eval_interval=2", "actor.precision=fp32", "rollout.precision=fp32")
PPO = ("train", "algorithm=ppo", *SHORT)
NO_CRITIC = ("model.num_action_chunks=1", "actor.optim.critic_warmup_iterations=0", *SHORT)
DAGGER = ("train", "algorithm=dagger", "algorithm.off_policy={warm_up: 0}", *NO_CRITIC)
ON_DATA = ("algorithm.off_policy.demos={demos}", "algorithm.offline.updates=3", *NO_CRITIC)
IQL = ("train", "algorithm=iql", *ON_DATA)
RECAP = ("train", "algorithm=recap", *ON_DATA)
SFT = ("sft", "sft.data_dir={demos}", "sft.max_steps=4", "sft.batch_size=8", "sft.log_interval=1", *SHORT[2:])
ALGORITHMS = {"ppo": PPO, "dagger": DAGGER, "iql": IQL, "recap": RECAP, "sft": SFT}
METRICS = {
    "ppo": ("train/policy_loss", "train/value_loss", "train/grad_norm"),
    "dagger": ("train/loss", "train/grad_norm", "train/l1", "train/num_updates"),
    "iql": ("train/policy_loss", "train/grad_norm", "train/critic_loss", "train/weight_mean"),
    "recap": ("train/policy_loss", "train/grad_norm"),
    "sft": ("loss", "grad_norm"),
}
Runs = Callable[[str, str], list[dict[str, float]]]


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return the rows of a run of an algorithm on an engine, which is made once."""
    directory = tmp_path_factory.mktemp("engines")
    config = directory / "tiny.yaml"
    config.write_text(TINY)

    @cache
    def demos() -> Path:
        made = directory / "demos"
        collected = ("collect.format=lerobot", f"collect.output_dir={made}")
        for command in (("collect", "--config", config, *collected), ("label", made)):
            outcome = embodrl(*command)
            assert outcome.code == 0, outcome.stderr
        return made

    @cache
    def run(algorithm: str, engine: str) -> list[dict[str, float]]:
        run_dir = directory / f"{algorithm}_{engine}"
        verb, *arguments = ALGORITHMS[algorithm]
        arguments = [text.replace("{demos}", str(demos())) if "{demos}" in text else text for text in arguments]
        is_sft = verb == "sft"
        where = [f"{'sft' if is_sft else 'runner'}.output_dir={run_dir}", *ENGINES[engine]]
        outcome = embodrl(verb, "--config", config, *arguments, *where)
        assert outcome.code == 0, outcome.stderr
        rows = (run_dir / ("sft_metrics.jsonl" if is_sft else "metrics.jsonl")).read_text().splitlines()
        return [json.loads(row) for row in rows]

    return run


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [(algorithm, engine) for algorithm in METRICS for engine in ("fsdp", "tensor_parallel")],
)
def test_an_engine_has_the_first_numbers_of_one_process(algorithm: str, engine: str, rows_of: Runs) -> None:
    rows, expected = rows_of(algorithm, engine), rows_of(algorithm, "native")
    first, of_one_process = (next(row for row in found if row.get(METRICS[algorithm][0])) for found in (rows, expected))
    for name in METRICS[algorithm]:
        assert first[name] == pytest.approx(of_one_process[name], rel=2e-3, abs=1e-5), name
    assert len(rows) == len(expected)
