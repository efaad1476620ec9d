"""Names of other systems lead to the right one here."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable

import pytest
from expect import raises_code

from embodrl.config import load_config
from embodrl.config.check import schema_keys, shipped_schemas
from embodrl.config.foreign_keys import FOREIGN_KEYS
from embodrl.config.other_systems import MEANT, OTHER_KEYS, OTHER_NAMES, key_advice
from embodrl.config.presets import groups, presets
from embodrl.errors import ConfigError, ConfigProblem
from embodrl.names import import_workflow
from embodrl.specs import ADVANTAGES, ENGINES, LOSSES, MODELS


@pytest.mark.parametrize(("key", "name"), OTHER_NAMES)
def test_a_name_of_another_system_is_answered(key: str, name: str) -> None:
    near, hint = OTHER_NAMES[key, name]
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", "model.warm_start=null", f"{key}='{name.upper()}'"])
    (problem,) = [found for found in caught.value.problems if found.key == key]
    assert (problem.nearest, problem.hint) == (near, hint)
    known: dict[str, Callable[[], list[str]]] = {
        "algorithm.adv_type": ADVANTAGES.names,
        "algorithm.loss_type": LOSSES.names,
        "model.model_type": MODELS.names,
        "rollout.backend": ENGINES.names,
        "runner.logger": list,
    }
    names = known[key]() if key in known else presets(key)
    assert name not in names and (near in names or not near) and (key in groups() or key in known)


FOREIGN = {
    (system, name): answer
    for system, keys in FOREIGN_KEYS.items()
    for names, answer in keys.items()
    for name in names.split(", ")
    if name != "others"
}


def test_keys_of_other_systems_are_answered_from_one_table() -> None:
    known = {key for schema in shipped_schemas() for key in schema_keys(schema)}
    answered = {name for _, name in FOREIGN} - known - set(MEANT) - set(OTHER_KEYS)
    assert len(answered) > 100
    for name in answered:
        near, hint = key_advice(name, lambda _: False) or ("", "")
        assert hint and (near in known or not near), name
        assert near in {ours for (_, key), (ours, _) in FOREIGN.items() if key == name}, name


@pytest.mark.parametrize(
    ("settings", "key", "near", "hints"),
    [
        (["async_level=2"], "async_level", "runner.max_staleness", []),
        (["rollout.max_head_offpolicyness=4"], "rollout.max_head_offpolicyness", "runner.max_staleness", []),
        (["critic.optim.lr=1e-5"], "critic", "actor.optim.value_lr", []),
        (["dag.custom_pipeline_fn=a:b"], "dag", "pipeline.fn", []),
        (
            ["actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.rollout.n=8"],
            "actor_rollout_ref",
            "actor.optim.lr",
            [
                "actor_rollout_ref.actor.optim.lr: write actor.optim.lr; ",
                "actor_rollout_ref.rollout.n: write algorithm",
            ],
        ),
    ],
)
def test_a_section_of_another_system_is_answered_by_its_keys(
    settings: list[str], key: str, near: str, hints: list[str]
) -> None:
    (problem,) = problems(*settings)
    assert (problem.key, problem.nearest) == (key, near)
    assert all(hint in problem.hint for hint in hints)


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_a_key_of_another_system_is_answered(key: str) -> None:
    near, hint = OTHER_KEYS[key]
    (problem,) = problems(f"{key}=x")
    assert (problem.code, problem.nearest, problem.hint) == ("config-unknown-key", near, hint)
    assert key.startswith(problem.key) and (not near or near in schema_keys(shipped_schemas()[0]))


@pytest.mark.parametrize(
    ("arguments", "code", "written"),
    [
        (["runner.seed=1,2,3"], "argument-sweep", "embodrl sweep runner.seed=1,2,3"),
        (["env", "toy"], "argument-form", "env=toy"),
        (["runner.seed", "3"], "argument-form", "runner.seed=3"),
        (['cluster.component_placement={"actor,rollout":all}'], "argument-syntax", r"{actor\,rollout:all}"),
        (["recipe.rl=[runner.seed=8]"], "argument-syntax", 'recipe.rl=["runner.seed=8"]'),
        (["cluster.component_placement=env:0"], "config-type", "'cluster.component_placement={"),
    ],
)
def test_a_form_that_is_refused_is_answered_with_the_one_that_works(
    arguments: list[str], code: str, written: str
) -> None:
    (problem,) = problems(*arguments)
    assert problem.code == code and written in problem.hint


HINTS = sorted({hint for _, hint in (*OTHER_NAMES.values(), *OTHER_KEYS.values())})
SETTINGS = re.compile(r"(?:(?:'[a-z_.]+=[^']+'|\b[a-z_.]+=[a-z0-9_]+\b(?!-))(?: (?=[a-z_.']+=))?)+")
INCOMPLETE = {"model=lerobot", "model=remote"}
"""What the hints name and that wants more, such as a directory of the user's."""
WRITTEN = sorted({found.strip() for hint in HINTS for found in SETTINGS.findall(hint)} - INCOMPLETE)


@pytest.mark.parametrize("written", WRITTEN)
def test_settings_of_the_hints_are_valid(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in ("mlflow", "swanlab") or find_spec(name))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    arguments = shlex.split(written)
    load_config([*arguments, *["cluster=8xh100"] * ("cluster." in written)], verb="plan")


def test_what_the_hints_write_is_valid() -> None:
    placed = load_config([r"cluster.component_placement={actor\,rollout\,env:all}"]).config.cluster.component_placement
    assert placed == {"actor,rollout,env": "all"}
    assert load_config(['recipe.rl=["runner.seed=8"]']).config.recipe.rl == ("runner.seed=8",)


def test_arguments_of_a_gymnasium_constructor_are_registered() -> None:
    (problem,) = problems("env=gymnasium_reacher", "env.goal_width=3")
    assert problem.code == "config-unknown-key"
    assert "gymnasium.register" in problem.hint and "'goal_width'" in problem.hint


def problems(*arguments: str) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        load_config(list(arguments))
    return caught.value.problems


def test_a_workflow_without_its_methods_is_named_with_them() -> None:
    with raises_code("workflow-abstract") as caught:
        import_workflow("embodrl.workers.workflows.workflow:RolloutWorkflow")
    assert "run_episode" in caught.value.message


def test_an_evaluation_reads_the_workflow_that_trains() -> None:
    path = "rollout.workflow=embodrl.workers.workflows.workflow:ChunkWorkflow"
    loaded = load_config([path, "model.random_weights=true"], verb="eval")
    assert loaded.config.rollout.workflow is not None
    assert not [note for note in loaded.notes if "workflow" in note.code or note.key == "rollout.workflow"]


@pytest.mark.parametrize(
    ("given", "near"),
    {
        "env.num_envs=64": "env.train.total_num_envs",
        "algorithm.clip_ratio_c=3.0": "algorithm.clip_ratio_dual",
        "env.train.rollout_epoch=2": "algorithm.rollout_epoch",
        "env.eval.ignore_terminations=true": "env.eval.to_step_limit",
        "env.eval.auto_reset=true": "env.eval.num_episodes",
        "env.eval.group_size=1": "env.eval.seed",
        "algorithm.kl_beta=0.1": "algorithm.kl.coef",
        "kl_penalty=k3": "algorithm.kl.estimator",
        "replay_buffer=10": "algorithm.off_policy.capacity",
        "rollout.sampling_params=3": "algorithm.sampling",
        "runner.max_steps=5": "runner.max_iterations",
        "runner.resume_dir=x": "",
        "runner.ckpt_path=x": "model.model_path",
        "runner.logger.log_path=x": "runner.output_dir",
        "rollout.model=x": "model",
        "rollout.enable_torch_compile=true": "",
        "env.eval.video_cfg=x": "env.video",
        "cluster.num_gpus=2": "cluster.placement",
        "runner.precision=fp16": "actor.precision",
        "name=foo": "runner.name",
        "steps=1000": "runner.max_iterations",
        "algorithm.loss_type=a2c": "actor_critic",
        "env=PickCube-v1": "maniskill_pick",
        "env=push-v3": "metaworld_mt1",
        "env.env_type=pusht": "",
        "actor.seed=1": "runner.seed",
    }.items(),
)
def test_rows_of_what_users_typed_are_answered_with_what_they_meant(given: str, near: str) -> None:
    # Followed literally, each of the former hints changed the run, or failed again.
    (problem, *_) = problems(given)
    assert problem.nearest == near
    assert not near or near in problem.hint or problem.hint.startswith("remove it")


@pytest.mark.parametrize(
    ("given", "near", "is_order"),
    [
        ("runner.save_intervall=3", "runner.save_interval", True),
        ("runner.save_intervall=often", "runner.save_interval", False),  # an integer
        ("runner.max_epoch=3", "runner.max_regression", False),
        ("algorithm.epochs=3", "algorithm.update_epoch", False),
        ("env=libero_spacial", "libero_spatial", True),
        ("env=libero_90", "libero_10", False),
        ("cluster=8xA100", "8xh100", False),
        ("model.model_type=pi5", "pi05", False),
        ("runner.max_iterations=1e3", "", True),
    ],
)
def test_a_name_is_ordered_only_where_it_is_misspelt_and_takes_the_value(given: str, near: str, is_order: bool) -> None:
    (problem,) = problems(given)
    assert problem.nearest == near
    assert ("write " in problem.hint) == is_order


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("outputs/ms1", "embodrl resume outputs/ms1"),
        ("config.yaml", "--config config.yaml"),
        ("resume=x", "resume RUN"),
    ],
)
def test_a_run_or_a_file_among_settings_is_answered_with_its_command(given: str, written: str) -> None:
    (problem,) = problems(given)
    assert written in problem.hint


LINES = {
    "verl": [
        ("algorithm.adv_estimator=grpo", "algorithm.adv_type"),
        ("data.train_batch_size=1024", "env.train.total_num_envs"),
        ("data.max_response_length=1024", ""),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "model.model_path"),
        ("actor_rollout_ref.model.use_remove_padding=True", ""),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=256", "actor.global_batch_size"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.kl.placement"),
        ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", "actor.enable_offload"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", ""),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "rollout.vllm.tensor_parallel_size"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=True", ""),
        ("trainer.n_gpus_per_node=8", "cluster.placement"),
        ("trainer.val_before_train=False", "runner.eval_at_start"),
        ("reward_model.reward_manager=dapo", "reward.fn"),
    ],
    "AReaL": [
        ("rollout.max_head_offpolicyness=2", "runner.max_staleness"),
        ("rollout.max_concurrent_rollouts=256", "env.train.total_num_envs"),
        ("actor.use_decoupled_loss=true", "algorithm.decoupled.enabled"),
        ("actor.optimizer.beta1=0.9", "actor.optim.betas"),
        ("actor.mb_spec.max_tokens_per_mb=10240", "actor.micro_batch_size"),
        ("gconfig.n_samples=4", "algorithm.group_size"),
        ("train_dataset.path=openai/gsm8k", ""),
        ("sglang.mem_fraction_static=0.8", ""),
        ("saver.freq_epochs=1", "runner.save_interval"),
        ("recover.mode=disabled", ""),
        ("allocation_mode=sglang:d4+fsdp:d4", "cluster.placement"),
    ],
    "Prime-RL": [
        ("orchestrator.batch_size=128", "env.train.total_num_envs"),
        ("orchestrator.group_size=16", "algorithm.group_size"),
        ("orchestrator.max_off_policy_steps=8", "runner.max_staleness"),
        ("deployment.num_train_gpus=2", "cluster.component_placement"),
        ("deployment.num_infer_nodes=1", "cluster.num_nodes"),
        ("inference.vllm.tensor_parallel_size=4", "rollout.vllm.tensor_parallel_size"),
        ("weight_broadcast.type=nccl", "rollout.weight_sync"),
        ("trainer.model.cp=2", ""),
        ("ckpt.interval=50", "runner.save_interval"),
        ("max_steps=200", "runner.max_iterations"),
    ],
    "slime": [
        ("rollout_batch_size=32", "env.train.total_num_envs"),
        ("n_samples_per_prompt=8", "algorithm.group_size"),
        ("advantage_estimator=grpo", "algorithm.adv_type"),
        ("eps_clip=0.2", "algorithm.clip_ratio_low"),
        ("colocate=true", "cluster.placement"),
        ("pipeline_model_parallel_size=1", ""),
        ("hidden_size=4096", ""),
        ("ref_load=models/reference", "algorithm.teacher"),
        ("num_rollout=3000", "runner.max_iterations"),
    ],
    "siiRL": [
        ("actor_rollout_ref.embodied.env.num_envs=16", "env.train.total_num_envs"),
        ("actor_rollout_ref.embodied.unnorm_key=libero_10_no_noops", "model.unnorm_key"),
        ("algorithm.embodied_sampling.filter_accuracy=True", "algorithm.filter.enabled"),
        ("actor_rollout_ref.actor.policy_drift_coeff=0.001", "algorithm.drift_coef"),
        ("algorithm.workflow_type=DAPO", ""),
        ("dag.custom_pipeline_fn=my_module:build", "pipeline.fn"),
    ],
}
"""Lines of the systems' own examples, and the key here that answers them, "" where the hint says why there is none."""


@pytest.mark.parametrize(("line", "ours"), [pair for lines in LINES.values() for pair in lines])
def test_a_line_of_an_example_is_answered(line: str, ours: str) -> None:
    (problem,) = problems(line)
    assert (problem.code, problem.nearest) == ("config-unknown-key", ours)
    assert problem.hint.startswith("write " if ours else ("remove it", "`embodrl"))


def test_there_are_forty_lines() -> None:
    assert sum(map(len, LINES.values())) >= 40
