"""Composition, precedence, origins, presets, round trips."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from expect import raises_code
from hypothesis import given, settings
from hypothesis import strategies as st

from embodrl.config import Config, load_config, load_resolved, load_run
from embodrl.config.nodes import parse_scalar, parse_yaml
from embodrl.config.presets import CONFIGS, groups, load_presets, presets
from embodrl.deployment.grammar import PlacementError, parse_ranks
from embodrl.errors import ConfigError

PRESETS = [(group, name) for group in groups() for name in presets(group)]


def test_main_job() -> None:
    loaded = load_config(["env=maniskill", "model=openvla"])
    config = loaded.config
    assert (config.env.env_type, config.env.tasks) == ("maniskill", ("PushCube-v1",))
    camera = config.env.cameras[0]
    assert (camera.name, camera.height, camera.width, camera.fov_rad) == ("base_camera", 64, 64, 1.0)
    assert loaded.notes == []
    assert loaded.choices == {"env": "maniskill", "model": "openvla"}


ONE_ROBOT = ["actor.micro_batch_size=20"]
FOUR_GPUS = ["cluster.hardware.name=four", "cluster.hardware.num_gpus=4"]
TWO_TRAINERS = "cluster.component_placement={actor:'0:0-1',rollout:0,env:0}"


@pytest.mark.parametrize(("group", "name"), PRESETS, ids=lambda part: part)
def test_every_preset_loads_and_says_what_it_is(group: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rl_token.json").touch()
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "advantages_recap.parquet").touch()
    lerobot = [f"model.python={sys.executable}", f"model.model_path={tmp_path}"]
    extra = {
        "libero_wrist": ["model=openvla_oft"],
        "megatron": [TWO_TRAINERS],
        "lerobot": lerobot,
        "planner": [
            *("env=toy", "rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'"),
            *("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=10"),
        ],
        "remote_text": [
            *("env=toy", "model.url=http://host:1/v1"),
            *("rollout.workflow='two_agents:Pilots'", "env.train.auto_reset=false"),
        ],
        "remote": ["model.url=ws://host:1" if group == "model" else "rollout.remote.urls=[http://host:1]"],
        "iql": ["env=toy", "model=mlp", "algorithm=iql", f"algorithm.off_policy.demos={tmp_path}"],
        "td3_bc": ["env=toy", "model=mlp", f"algorithm.off_policy.demos={tmp_path}"],
        "opd": [f"algorithm.teacher={tmp_path}"],
        "recap": ["env=toy", "model=mlp", "algorithm=recap", f"algorithm.off_policy.demos={tmp_path}"],
        "robot": ["model=mlp", "env.instruction=lift", *ONE_ROBOT, "actor.global_batch_size=200"],
        "robot_sim": ["model=mlp", *ONE_ROBOT, "actor.global_batch_size=100"],
        "pick_cube_rlpd": [f"algorithm.off_policy.demos={tmp_path}"],
        "libero_spatial_0_reward": [f"algorithm.off_policy.demos={tmp_path}", f"model.warm_start={tmp_path}"],
        "disaggregated": FOUR_GPUS,
        "hybrid": FOUR_GPUS if group == "cluster" else [],
        "rlpd": ["env=toy", "model=mlp", f"algorithm.off_policy.demos={tmp_path}"],
        "hil_serl": ["env=toy", "model=mlp", f"algorithm.off_policy.demos={tmp_path}"],
        "ppo_gaussian": ["model=mlp"],
        "fpo": ["model=pi0"],
        "pi_nft": ["model=pi0"],
        "dsrl": ["model=pi0", f"model.warm_start={tmp_path}"],
        "rlt": ["model=pi0", f"model.warm_start={tmp_path}"],
        "sac": ["env=toy", "model=mlp", *(["algorithm=sac"] if group == "pipeline" else [])],
    }.get(name, [])
    if group == "model" and name.endswith("_libero"):
        extra = ["env=libero_spatial"]  # what they need of the environment
    # The hardware of a cluster need not be here, nor the package of a backend.
    verb = (
        "plan"
        if group == "cluster" or name in ("vllm", "megatron")
        else "eval"
        if name in ("lerobot", "remote_text") or (group, name) == ("model", "remote")
        else None
    )
    loaded = load_config([f"{group}={name}", *extra], verb=verb)
    assert f"configs/{group}/{name}.yaml" in {origin.source for origin in loaded.origins.values()}
    assert (CONFIGS / group / f"{name}.yaml").read_text().startswith("# ")


def defaults_of(part: tuple[str, str]) -> str:
    """Return what decides how a preset is merged."""
    text = (CONFIGS / part[0] / f"{part[1]}.yaml").read_text()
    kinds = re.findall(r"^(?:# @package|defaults:|  - (?:override )?|  last:)", text, re.MULTILINE)
    return "".join(sorted(set(kinds), key=kinds.index))


FIRST = {defaults_of(part): part for part in reversed(PRESETS)}.values()
MERGED = [pytest.param(*part, marks=() if part in FIRST else pytest.mark.long) for part in PRESETS]


@pytest.mark.parametrize(("group", "name"), MERGED, ids=lambda part: part)
def test_presets_merge_as_hydra_would(group: str, name: str) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
        composed = compose("train", [f"{group}={name}"])
    OmegaConf.set_struct(composed, False)
    last = composed.get(group, {}).pop("last", {}) if group != "cluster" else {}  # merged after all presets
    expected = OmegaConf.to_container(OmegaConf.merge(composed, last))
    tree, problems, _ = load_presets({group: name})
    assert problems == []
    assert tree.plain() == expected


def test_every_task_of_maniskill_and_the_mix_have_presets() -> None:
    tasks = [load_config([f"env={name}"]).config.env.tasks for name in presets("env") if name.startswith("maniskill_")]
    assert sorted(tasks) == [
        ("LiftPegUpright-v1",),
        ("PegInsertionSide-v1",),
        ("PickCube-v1",),
        ("PlaceSphere-v1",),
        ("PokeCube-v1",),
        ("PullCube-v1",),
        ("PullCubeTool-v1",),
        ("PushCube-v1",),
        ("PushCube-v1", "PullCube-v1"),
        ("RollBall-v1",),
        ("StackCube-v1",),
    ]


def line_of(text: str, preset: str = "maniskill") -> int:
    """Return the line of an environment's preset that holds a text."""
    lines = (CONFIGS / "env" / f"{preset}.yaml").read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_precedence_and_origins(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "presets: {env: maniskill_pull}\nrunner:\n  seed: 5\n  max_iterations: 8\nactor: {micro_batch_size: 40}\n"
    )
    loaded = load_config(["runner.seed=7", "env=maniskill_mix", "runner.seed=9"], path)
    assert loaded.config.runner.seed == 9
    assert loaded.config.runner.max_iterations == 8
    assert loaded.config.env.tasks == ("PushCube-v1", "PullCube-v1")
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    assert origins["runner.seed"] == "command line: runner.seed=9"
    assert origins["runner.max_iterations"] == f"{path}:4"
    assert origins["actor.micro_batch_size"] == f"{path}:5"
    assert origins["env.tasks"] == f"configs/env/maniskill_mix.yaml:{line_of('tasks:', 'maniskill_mix')}"
    camera = f"configs/env/maniskill_mix.yaml:{line_of('name: base_camera', 'maniskill_mix')}"
    assert origins["env.cameras.0.name"] == camera
    count = f"configs/env/maniskill.yaml:{line_of('total_num_envs: 32')}"
    assert origins["env.train.total_num_envs"] == count
    assert origins["env.num_processes"] == f"configs/env/maniskill.yaml:{line_of('num_processes: 2')}"
    assert origins["env.include_state"] == "schema default"
    assert origins["runner.keep_last_n"] == "schema default"


def test_file_presets_are_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("presets: {env: maniskill_pull, runner: debug}\n")
    config = load_config([], path).config
    assert (config.env.tasks, config.runner.max_iterations) == (("PullCube-v1",), 2)


def test_experiment_overrides_groups_and_gives_way_to_the_user() -> None:
    loaded = load_config(["experiment=push_and_pull"])
    assert loaded.config.env.tasks == ("PushCube-v1", "PullCube-v1")
    assert loaded.config.runner.max_iterations == 100
    changed = load_config(["experiment=push_and_pull", "env=maniskill_pick", "runner.max_iterations=9"]).config
    assert (changed.env.tasks, changed.runner.max_iterations) == (("PickCube-v1",), 9)


def test_tilde_goes_back_to_the_schema() -> None:
    loaded = load_config(["env.cameras=[{name: top}]", "~env.cameras"])
    assert [(note.key, note.code) for note in loaded.notes] == [("env.cameras", "argument-taken-back")]
    assert loaded.config.env.cameras == Config().env.cameras
    assert str(loaded.origins["env.cameras.0.name"]) == "schema default"


def test_a_mapping_is_merged_and_a_placement_replaced(tmp_path: Path) -> None:
    config = load_config(["env.train={seed: 4}", "cluster.component_placement={actor:0,rollout:0,env:all}"]).config
    assert (config.env.train.seed, config.env.train.total_num_envs) == (
        4,
        load_config([]).config.env.train.total_num_envs,
    )
    assert config.cluster.component_placement == {"actor": "0", "rollout": "0", "env": "all"}


def test_types_from_the_command_line() -> None:
    config = load_config(
        ["env.tasks=[PushCube-v1,PullCube-v1]", "algorithm.gamma=1", "actor.optim.lr=1e-4", "algorithm.value_clip=null"]
    ).config
    assert config.env.tasks == ("PushCube-v1", "PullCube-v1")
    assert (config.algorithm.gamma, config.actor.optim.lr, config.algorithm.value_clip) == (1.0, 1e-4, None)


def test_references() -> None:
    loaded = load_config(["runner.seed=3", "runner.name=run-${runner.seed}", "env.train.seed=${runner.seed}"])
    assert (loaded.config.runner.name, loaded.config.env.train.seed) == ("run-3", 3)
    assert load_config(["runner.name=${env.eval.seed}x"]).config.runner.name == "1000000x"


@pytest.mark.parametrize("with_origin", [False, True])
def test_round_trip(tmp_path: Path, with_origin: bool) -> None:
    loaded = load_config(["env=maniskill_mix", "runner.logger.wandb_mode=off", "runner.name='007'", "sft.lr=3e-7"])
    path = tmp_path / "config.yaml"
    path.write_text(loaded.to_yaml(with_origin))
    assert load_resolved(path) == loaded.config
    assert load_config([], path).config == loaded.config
    assert yaml.safe_load(path.read_text()) == json.loads(loaded.config.model_dump_json())  # other readers, too


def test_overrides_on_a_resolved_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config([]).to_yaml())
    assert load_resolved(path, ["runner.max_iterations=99"]).runner.max_iterations == 99
    with raises_code("preset-of-a-run"):
        load_run(path, ["env=maniskill_mix"])


def test_a_rollout_as_long_as_an_episode_and_the_toy_preset_are_not_noted() -> None:
    assert load_config(["env.train.max_steps_per_rollout_epoch=25"]).notes == []
    assert load_config(["env=toy", "model.warm_start=null"]).notes == []


def test_training_seeds_are_drawn_so_they_may_be_any() -> None:
    assert load_config(["env.train.seed=1000000"]).config.env.train.seed == 1_000_000


def test_paths_of_the_model_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "builtin"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)

    def model(*arguments: str) -> tuple[str | None, str | None]:
        config = load_config(list(arguments)).with_absolute_paths().config
        return config.model.model_path, config.model.warm_start

    assert model("model.warm_start=mine") == (None, str(tmp_path / "mine"))
    assert model("model.model_path=./mine") == (str(tmp_path / "mine"), "builtin")
    assert model("model.model_path=openvla/openvla-7b") == ("openvla/openvla-7b", "builtin")
    assert model() == (None, "builtin"), "the shipped weights, even beside a directory of that name"


def test_a_warm_start_may_be_gone_when_a_run_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(load_config([]).to_yaml().replace("warm_start: builtin", "warm_start: /no/such/directory"))
    assert load_run(path, resuming=True).config.model.warm_start == "/no/such/directory"
    with raises_code("warm-start-exists"):
        load_run(path)


def test_a_very_short_run_is_noted_but_not_refused() -> None:
    notes = load_config(["runner.max_iterations=1"]).notes
    assert [note.key for note in notes] == ["actor.optim.critic_warmup_iterations"]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["algorithm.entropy_type=chunk_level"], "algorithm.entropy_type"),
        (["actor.optim.lr_scheduler=constant", "actor.optim.min_lr_ratio=0.1"], "actor.optim.min_lr_ratio"),
        (["model.unnorm_key=bridge"], "model.unnorm_key"),
        (["model.model_path=openvla/openvla-7b", "model.warm_start=builtin"], "model.warm_start"),
        (["model.model_path=openvla/openvla-7b", "model.architecture.image_size=128"], "model.architecture.image_size"),
        (["env.include_state=true"], "env.include_state"),
        (["runner.eval_interval=90"], "runner.eval_interval"),
        (["runner.eval_interval=0", "runner.eval_at_start=false", "env.video.every_eval=true"], "env.video.every_eval"),
        (["collect.noise_std=0.0", "collect.noise_fraction=0.5"], "collect.noise_fraction"),
        (["runner.logger.wandb_project=mine"], "runner.logger.wandb_project"),
        (["env.video.num_episodes=200"], "env.video.num_episodes"),
        (["env=maniskill_mix", "env.eval.num_episodes=99"], "env.eval.num_episodes"),
        (["cluster.num_threads=4096"], "cluster.num_threads"),
        (["env=toy", "env.reward_mode=sparse"], "env.reward_mode"),
        (["env=toy", "env.success_bonus=2"], "env.success_bonus"),
        (["env=toy", "env.video.height=64"], "env.video.height"),
        (["env=toy", "env.render_detail=full"], "env.render_detail"),
        (["env=maniskill", "env.render_detail=fast", "env.mesh_decimation=0"], "env.render_detail"),
        (["env.train.max_steps_per_rollout_epoch=20"], "env.train.max_steps_per_rollout_epoch"),
        (
            ["env.num_processes=4096", "env.train.total_num_envs=4096", "env.eval.total_num_envs=4096"],
            "env.num_processes",
        ),
        (["rollout.enable_offload=true"], "rollout.enable_offload"),
        (["env.offload_level=simulator"], "env.offload_level"),
    ],
)
def test_settings_without_effect_are_noted(arguments: list[str], key: str) -> None:
    if key == "env.num_processes":
        arguments = [*arguments, "actor.global_batch_size=4096", "actor.micro_batch_size=4096"]
    if key == "env.train.max_steps_per_rollout_epoch":
        arguments = [*arguments, "actor.global_batch_size=64", "actor.micro_batch_size=32"]
    assert key in [note.key for note in load_config(arguments).notes]


def test_extension_registers_before_names_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from embodrl.specs import ENVS

    monkeypatch.setattr(ENVS, "_entries", dict(ENVS._entries))
    (tmp_path / "my_extension_a.py").write_text(
        "from embodrl.specs import ENVS\nENVS.add('mine', 'my.env:Env', tasks=('reach',), action_dim=7)\n"
    )
    (tmp_path / "my_extension_b.py").write_text("raise RuntimeError('broken on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["env.env_type=mine", "env.tasks=[reach]"]
    with raises_code("env-is-registered"):
        load_config(arguments)
    assert load_config([*arguments, "extensions=[my_extension_a]"]).config.env.env_type == "mine"
    with raises_code("extension-import"):
        load_config(["extensions=[my_extension_b]"])


def test_tricks_run_no_code_and_write_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "made"
    tricks = [
        f"_target_: venv.create\nenv_dir: {made}\n",
        f"env: {{_target_: pathlib.Path.touch, _args_: ['{made}']}}\n",
        f"runner: {{name: !!python/object/apply:os.mkdir ['{made}']}}\n",
        f"runner: !!python/object/apply:os.mkdir ['{made}']\n",
        f"model: {{model_type: '{made}:touch', _convert_: all}}\n",
        f"runner: {{name: '${{oc.create:{made}}}'}}\n",
        "extensions: ['subprocess:run']\n",
    ]
    for text in tricks:
        path = tmp_path / "trick.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_config([], path)
    for arguments in (["env._target_=os.mkdir", f"env._args_=['{made}']"], ["+_target_=os.mkdir"]):
        with pytest.raises(ConfigError):
            load_config(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["trick.yaml"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-3", -3), ("1_000", "1_000"), ("1e-3", 1e-3), ("5.", 5.0),
        (".5", 0.5), ("null", None), ("~", None), ("", None),
        ("true", True), ("False", False), ("off", "off"), ("no", "no"), ("1:30", "1:30"), ("0-3", "0-3"), ("v1", "v1"),
        ("2026-01-02", "2026-01-02"), (".inf", float("inf")), ("-.inf", float("-inf")),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    result = parse_scalar(text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("text", "devices", "processes"),
    [
        ("0", (0,), 1),
        ("0-3", (0, 1, 2, 3), 4),
        ("0-1:0-3", (0, 1), 4),
        ("0-1:0-3,3-5,7-10:7-14", (0, 1, 3, 4, 5, 7, 8, 9, 10), 15),
    ],
)
def test_placements(text: str, devices: tuple[int, ...], processes: int) -> None:
    place = parse_ranks(text)
    assert place is not None
    assert (place.devices, place.num_processes) == (devices, processes)
    assert parse_ranks("all") is None


@pytest.mark.parametrize("text", ["", "x", "3-1", "0-1:0-2", "0,0", "0:", "-1", "0-99999999"])
def test_wrong_placements(text: str) -> None:
    with pytest.raises(PlacementError):
        parse_ranks(text)


def test_values_are_frozen() -> None:
    config = load_config([]).config
    with pytest.raises(ValueError, match="frozen"):
        config.runner.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config([]).origins["runner.seed"].line = 3  # type: ignore[misc]


KEYS = [
    "runner",
    "runner.seed",
    "env",
    "env.cameras",
    "env.tasks",
    "x",
    "_target_",
    "cluster.component_placement",
    "extensions",
]
JUNK = st.text(alphabet="ab01[]{}:,=-~+.$' \"\n#&*!|>?%@\\\t", max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "+", "~"]), st.sampled_from(KEYS), JUNK), max_size=3))
def test_any_argument_is_loaded_or_reported(parts: list[tuple[str, str, str]]) -> None:
    arguments = [f"{prefix}{key}={value}" for prefix, key, value in parts]
    try:
        load_config(arguments)
    except ConfigError as error:
        assert error.problems


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab01[]{}:,-~.$' \"\n#&*!|>?%@\\\t", max_size=40))
def test_any_yaml_is_parsed_or_reported(text: str) -> None:
    tree, problems = parse_yaml(text, "x.yaml")
    assert isinstance(tree.plain(), dict)
    assert all(problem.origin.startswith("x.yaml") and problem.hint for problem in problems)


def test_what_a_run_keeps_gives_no_notes(tmp_path: Path) -> None:
    toy = ["env=toy", "model.warm_start=null"]  # the shipped policy does not know this task, which is noted
    for arguments in (toy, ["env=maniskill"], ["env=toy", "model=pi0"], [*toy, "algorithm=grpo"]):
        path = tmp_path / "config.yaml"
        path.write_text(load_config(arguments).to_yaml())
        assert load_config([], path).notes == []


def test_a_far_off_name_of_another_section_is_not_proposed() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["foo.bar=1"])
    [problem] = caught.value.problems
    assert not problem.nearest and "`embodrl config show`" in problem.hint


def test_rollouts_follow_the_precision_of_training() -> None:
    for setting, acting in (("actor.precision=fp32", "fp32"), ("actor.precision=auto", "auto")):
        for more in ([], ["rollout.precision=auto"]):
            assert load_config(["env=toy", "model.warm_start=null", setting, *more]).config.rollout.precision == acting


def test_a_setting_that_is_given_twice_is_noted() -> None:
    def noted(*arguments: str) -> list[str]:
        notes = load_config([*arguments, "model.warm_start=null"]).notes
        return [note.key for note in notes if note.code == "argument-repeated"]

    assert noted("env=toy", "runner.seed=1", "runner.seed=2") == ["runner.seed"]
    assert noted("env=maniskill", "env=toy") == ["env"]
    assert noted("env=toy", "runner.seed=2", "runner.seed=2") == []
