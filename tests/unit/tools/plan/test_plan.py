import functools
import json
import shlex

import numpy as np
import pytest
import torch
from documented import ROOT
from runs import script
from typer.testing import CliRunner

from embodrl.cli.main import about, app
from embodrl.config import load_config
from embodrl.models.registry import build_policy
from embodrl.preflight.rollout_memory import recorded_bytes
from embodrl.preflight.run_memory import ESTIMATED_BY, GIB, HOST, KEPT_FREED_BYTES, MIB
from embodrl.tools.plan.cli import changed
from embodrl.tools.plan.fit import find_fit
from embodrl.tools.plan.plan import make_plan, per_device
from embodrl.types import Observation, SamplingParams

CLI = CliRunner()
SEVEN_B = ["model=openvla_7b", "cluster=1xh200", "env.num_processes=8", "env.train.total_num_envs=64"]


@functools.cache
def plan_of(*arguments):
    """Return the plan of a configuration; callers don't change it."""
    return make_plan(load_config(list(arguments), verb="plan"))


def memory_of(plan, device):
    return next(memory for memory in plan.memory.memories if memory.device == device)


def test_batch_arithmetic_of_eight_gpus():
    plan = plan_of(
        "cluster=8xh100",
        "cluster.component_placement={actor:0-3,rollout:4-7,env:0-7}",
        "env.num_processes=16",
        "env.train.total_num_envs=128",
        "rollout.pipeline_stages=2",
        "actor.global_batch_size=320",
        "actor.micro_batch_size=16",
    )
    b = plan.batches
    assert (b.environments_per_simulator, b.simulators_per_rollout, b.environments_per_stage) == (8, 4, 16)
    assert (b.chunks_per_environment, b.chunks, b.environment_steps) == (20, 2560, 12800)
    assert (b.batch_per_actor, b.gradient_accumulation, b.optimizer_steps) == (80, 5, 16)
    assert per_device(plan.deployment)["0:2"] == {"actor": 1, "env": 2}
    assert any("1 process on 1 device" in line for line in plan.obstacles)


def test_memory_of_the_7b_by_hand():
    plan = plan_of(*SEVEN_B, "actor.param_dtype=bf16", "actor.micro_batch_size=1")
    gpu = memory_of(plan, 0)
    # Llama 2 7B keeps 2 x 32 layers x 4096 numbers a position; 256 patches, the prompt and 7 action tokens.
    config = load_config(["model=openvla_7b"]).config
    positions = 256 + config.model.architecture.max_prompt_tokens + 7
    assert gpu.needed["KV cache"] == 64 * 2 * 32 * 4096 * positions * 2
    assert 7.2e9 < gpu.needed["gradients"] / 2 < 7.7e9
    assert 5.99 < gpu.needed["optimizer"] / gpu.needed["gradients"] < 6  # 3 x 4 bytes, but of the value head 2 x 4
    assert gpu.needed["rollout weights"] == 0
    assert memory_of(plan, HOST).needed["simulator"] == 8 * 600 * MIB + 64 * 5 * MIB
    assert plan.fits


def test_a_process_that_trains_on_a_cpu_keeps_freed_memory():
    one, host = ["cluster=local", "cluster.device=cpu"], HOST
    tiny, large = (memory_of(plan_of(*one, model), host).needed for model in ("model=openvla", "model=openvla_7b"))
    tensors = ("weights", "gradients", "optimizer", "activations")
    assert tiny["allocator"] == sum(tiny[part] for part in tensors) < large["allocator"] == KEPT_FREED_BYTES
    assert "allocator" not in memory_of(plan_of(*SEVEN_B), HOST).needed


def test_a_memory_that_is_too_small_is_named_with_hints():
    plan = plan_of(*SEVEN_B, "actor.micro_batch_size=80", "actor.param_dtype=fp32")
    assert not plan.fits
    gpu = memory_of(plan, 0)
    assert not gpu.fits and gpu.total > gpu.available > 139 * GIB and memory_of(plan, HOST).fits
    text = " ".join(plan.memory.hints)
    assert "actor.param_dtype=bf16 with model.trainable=lora" in text and "gradient_checkpointing" in text
    assert "saves little, given the optimizer's float32 copies" in text
    assert gpu.needed["rollout weights"] == 0 and "rollout.enable_offload" not in text  # nothing to keep elsewhere


def test_bf16_is_recommended_without_reserve_only_for_adapters():
    plan = plan_of(*SEVEN_B, "actor.micro_batch_size=80", "actor.param_dtype=fp32", "model.trainable=lora")
    (hint,) = [hint for hint in plan.memory.hints if hint.startswith("actor.param_dtype")]
    assert hint == "actor.param_dtype=bf16 halves the weights; adapters stay in float32"


def test_the_largest_micro_batch_that_fits_is_named():
    arguments = [*SEVEN_B, "actor.param_dtype=bf16", "actor.global_batch_size=320"]
    large = plan_of(*arguments, "actor.micro_batch_size=80")
    (line,) = [line for line in large.memory.hints if line.startswith("actor.micro_batch_size")]
    rows = int(line.rpartition(" ")[2])
    row_bytes = memory_of(large, 0).needed["activations"] / 80
    rest = 0.9 * memory_of(large, 0).available - (memory_of(large, 0).total - 80 * row_bytes)
    assert rows == int(rest / row_bytes) and 1 <= rows < 80


def test_a_rollout_apart_has_weights_of_its_own():
    together = plan_of("cluster=8xh100")
    apart = plan_of("cluster=8xh100", "cluster.component_placement={actor:0,rollout:1,env:0-1}")
    assert memory_of(together, 0).needed["rollout weights"] == 0
    assert memory_of(apart, 1).needed["rollout weights"] > 0 and "weights" not in memory_of(apart, 1).needed


def test_idle_gpus_and_crowded_cores_are_reported():
    text = "\n".join(plan_of("cluster=8xh100").warnings)
    assert "7 of 8 GPUs have neither actor nor rollout" in text
    crowded = plan_of("cluster=laptop", "env.num_processes=8", "env.train.total_num_envs=32")
    assert "8 simulators share 2 cores" in "\n".join(crowded.warnings)


@pytest.mark.parametrize(
    "arguments",
    [
        ["model=openvla"],
        ["model=openvla", "model.freeze_vision=true"],
        ["model=openvla_oft"],
        ["model=openvla_oft", "model.trainable=head"],
        ["model=openvla_oft", "model.use_proprio=true", "env.include_state=true"],
        ["model=pi0"],
        ["model=pi0", "model.flow.method=flow_noise"],
        ["model=gr00t"],
        ["model=gr00t_n1_7"],
        ["model=smolvla"],
    ],
)
def test_the_recorded_bytes_are_those_that_the_policy_returns(arguments):
    config = load_config([*arguments, "model.warm_start=null"]).config
    policy, _ = build_policy(config.model, device="cpu", dtype=torch.float32, seed=0)
    dims = 7 if config.env.include_state else 0
    observation = Observation(
        np.zeros((2, 1, 64, 64, 3), np.uint8), np.zeros((2, dims), np.float32), ["push it"] * 2, np.zeros(2, np.int32)
    )
    output = policy.predict_action_batch(observation, "train", SamplingParams())
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in output.forward_inputs.values()) // 2
    chunk = policy.num_action_chunks
    columns = 4 * chunk * 7 + 7 * chunk + 33  # log-probs; rewards and three flags; versions, ids and values
    assert recorded_bytes(policy, 1, 64, 64) == inputs + columns


@pytest.mark.parametrize("cluster", ["8xh100", "2x8xh100", "1xh200", "laptop"])
def test_every_described_cluster_can_be_planned_for(cluster):
    result = CLI.invoke(app, ["plan", "train", f"cluster={cluster}", "--json"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["described"] and plan["cluster"] == cluster and plan["fits"]
    assert [p["component"] for p in plan["processes"]][:2] == ["actor", "rollout"]


def test_a_plan_that_does_not_fit_exits_with_1_and_says_so():
    result = CLI.invoke(app, ["plan", "train", *SEVEN_B, "actor.micro_batch_size=80"])
    assert result.exit_code == 1
    assert "does not fit" in result.stdout and "hint: actor.param_dtype=bf16" in result.stdout


def test_no_simulator_is_imported(tmp_path):
    code = """
import sys
assert not {"mani_skill", "sapien", "ray"} & set(sys.modules)
from embodrl.config import load_config
from embodrl.tools.plan.fit import find_fit
from embodrl.tools.plan.plan import make_plan
make_plan(load_config(["cluster=8xh100"], verb="plan"))
assert not {"mani_skill", "sapien", "ray"} & set(sys.modules)
"""
    (tmp_path / "plan.py").write_text(code)
    script(tmp_path / "plan.py")


APART = (*SEVEN_B, "actor.own_process=true", "actor.param_dtype=bf16", "actor.micro_batch_size=4")


def test_what_leaves_between_phases_counts_once():
    stays = plan_of(*APART)
    leaves = plan_of(*APART, "actor.enable_offload=true", "rollout.enable_offload=true", "env.enable_offload=true")
    gpu = memory_of(leaves, 0)
    assert gpu.needed == memory_of(stays, 0).needed
    assert memory_of(stays, 0).total == sum(gpu.needed.values())
    trains = [gpu.needed[name] for name in ("weights", "gradients", "optimizer", "reference", "activations")]
    acts = [gpu.needed[name] for name in ("rollout weights", "KV cache")]
    assert gpu.in_phase("training") == sum(trains) and gpu.in_phase("rollouts") == sum(acts)
    kept = [gpu.needed[name] for name in ("weights", "optimizer", "reference")]
    assert gpu.in_phase("handover") == sum(kept) + gpu.needed["rollout weights"]
    assert gpu.total == max(gpu.in_phase(phase) for phase in ("training", "handover", "rollouts")) == sum(trains)
    host, before = memory_of(leaves, HOST), memory_of(stays, HOST)
    assert host.needed["offloaded"] == sum(kept) + gpu.needed["rollout weights"]
    assert host.in_phase("training") == sum(host.needed.values()) - host.needed["simulator"]
    assert before.total == sum(before.needed.values()) == host.total - host.needed["offloaded"]


def test_rollout_processes_have_weights_that_leave():
    plan = plan_of(*SEVEN_B, "rollout.own_process=true", "actor.enable_offload=true", "rollout.enable_offload=true")
    gpu = memory_of(plan, 0)
    assert gpu.needed["rollout weights"] > 0
    assert gpu.in_phase("rollouts") == gpu.needed["rollout weights"] + gpu.needed["KV cache"]
    assert "weights" in gpu.needed and "kept policy" not in memory_of(plan, HOST).needed


def test_a_main_process_that_neither_trains_nor_acts_keeps_a_policy():
    one, both = plan_of(*APART), plan_of(*APART, "rollout.own_process=true")
    more = memory_of(both, HOST).needed["program"] - memory_of(one, HOST).needed["program"]
    assert memory_of(both, HOST).needed["kept policy"] == memory_of(both, 0).needed["rollout weights"]
    assert "kept policy" in ESTIMATED_BY
    ahead = memory_of(
        plan_of(*APART, "rollout.own_process=true", "runner.max_staleness=1", "algorithm.decoupled.enabled=true"), HOST
    ).needed["kept policy"]
    assert ahead == memory_of(both, HOST).needed["kept policy"] + memory_of(both, 0).needed["gradients"]
    assert more == memory_of(one, HOST).needed["program"] / 2


def test_the_processes_of_a_node_are_counted():
    one, more = plan_of(*APART), plan_of(*APART, "pipeline.placement={advantage: '0:0-1'}")
    added = memory_of(more, HOST).needed["program"] - memory_of(one, HOST).needed["program"]
    assert added == memory_of(one, HOST).needed["program"]  # two processes beside two


def test_every_process_that_has_the_rollout_is_counted():
    def buffer(*arguments):
        return memory_of(plan_of(*SEVEN_B, *arguments), HOST).needed["trajectory buffer"]

    once = buffer()
    assert buffer("actor.own_process=true") == buffer("rollout.own_process=true") == 2 * once
    assert buffer("actor.own_process=true", "rollout.own_process=true") == 3 * once


def test_shared_weights_stay_on_the_gpu():
    plan = plan_of(*SEVEN_B, "actor.micro_batch_size=1", "actor.enable_offload=true")
    gpu = memory_of(plan, 0)
    assert gpu.in_phase("rollouts") == gpu.needed["weights"] + gpu.needed["KV cache"]
    assert memory_of(plan, HOST).needed["offloaded"] == gpu.needed["optimizer"] + gpu.needed["reference"]


def test_on_a_cpu_only_simulators_leave_memory():
    plan = plan_of("cluster=laptop", "actor.enable_offload=true", "env.enable_offload=true")
    host = memory_of(plan, HOST)
    assert "offloaded" not in host.needed
    assert host.total == host.in_phase("rollouts") == sum(host.needed.values())
    assert host.in_phase("training") == host.total - host.needed["simulator"]
    kept = plan_of("cluster=laptop", "env.enable_offload=true", "env.offload_level=simulator")
    assert memory_of(kept, HOST).in_phase("training") == memory_of(kept, HOST).total


SMALL = ("model=openvla", "cluster.hardware.name=small")


def fitted(*arguments):
    return find_fit(lambda added: load_config(changed(arguments, added), verb="plan"))


def plan_json(*arguments):
    result = CLI.invoke(app, ["plan", "train", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_a_tiny_architecture_is_named_with_the_preset_of_its_public_size():
    for model, public in (("pi05", "model=pi05_3b"), ("pi0", "model=pi0_3b"), ("smolvla", "model=smolvla_450m")):
        memory = plan_of(f"model={model}", "cluster=8xh100").memory
        assert memory.tiny and memory.public_size == public
    assert plan_of("model=pi0_fast", "cluster=8xh100").memory.tiny
    assert not plan_of(*SEVEN_B).memory.tiny and not plan_of("model=mlp", "cluster=8xh100").memory.tiny


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("pi0_3b", 3_238_048_528),
        ("pi05_3b", 3_353_433_872),
        ("smolvla_450m", 402_737_376),
        ("gr00t_n1_5_3b", 2_724_163_520),
    ],
)
def test_presets_of_public_size_have_the_parameters_of_the_checkpoints(model, parameters):
    policy, _ = build_policy(load_config([f"model={model}"]).config.model, device="meta", dtype=torch.bfloat16, seed=0)
    assert sum(p.numel() for p in policy.model.parameters()) == pytest.approx(parameters, rel=6e-4)


def test_a_plan_of_an_unknown_model_does_not_pass():
    code, plan = plan_json("model=pi05", "model.model_path=owner/name", "cluster=8xh100")
    assert code == 1 and not plan["fits"] and plan["memory_not_estimated"]
    assert any("model=pi05_3b" in hint for hint in plan["hints"])


def test_idle_gpus_come_first_in_the_hints():
    hint = plan_of("model=openvla_7b", "cluster=8xh100").memory.hints[0]
    assert hint.startswith("actor=fsdp cluster.placement=auto env.num_processes=8 actor.micro_batch_size=20")


@pytest.mark.parametrize(
    ("cluster", "gib", "among", "adapters"),
    [
        ("8xh100", 10.0, (), False),
        ("8xh100", 0.03, ("actor=fsdp", "cluster.placement=auto", "env.num_processes=8"), False),
        ("1xh200", 0.03, ("model.trainable=lora",), True),
    ],
)
def test_fit_finds_settings_that_fit_when_they_are_planned(cluster, gib, among, adapters):
    arguments = (*SMALL, f"cluster={cluster}", f"cluster.hardware.gpu_memory_gib={gib}")
    found = fitted(*arguments)
    assert set(among) <= set(found.overrides) and found.adapters == adapters
    assert plan_of(*changed(arguments, found.overrides)).fits
    assert len({text.partition("=")[0] for text in found.overrides}) == len(found.overrides)


def test_fit_says_when_nothing_fits():
    arguments = (*SMALL, "cluster=8xh100", "cluster.hardware.gpu_memory_gib=0.001")
    assert fitted(*arguments) is None
    code, plan = plan_json(*arguments, "--fit")
    assert code == 1 and plan["fit"] is None and plan["fit_trains_adapters"] is None


def test_fit_needs_the_size_of_the_model():
    arguments = ("plan", "train", "model=pi05", "model.model_path=owner/name", "cluster=8xh100", "--fit")
    result = CLI.invoke(app, arguments)
    assert result.exit_code == 1
    assert "--fit needs the size of the model: give the directory" in result.stdout
    assert "larger GPUs" not in result.stdout
    code, plan = plan_json(*arguments[2:])
    assert code == 1 and plan["fit"] is None


def test_fit_names_each_candidate_before_it_is_worked_out():
    arguments = (*SMALL, "cluster=8xh100", "cluster.hardware.gpu_memory_gib=0.03")
    result = CLI.invoke(app, ["plan", "train", *arguments, "--fit"])
    tried = [line for line in result.stderr.splitlines() if line.startswith("trying ")]
    assert result.exit_code == 0 and "as it is" in tried[0]
    assert len(set(tried)) == len(tried) > 1 and "actor=fsdp" in tried[1]


def test_the_plan_of_the_readme_and_of_the_help_fits():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith("embodrl plan train")]
    arguments = shlex.split(line, comments=True)[2:]
    (example,) = [line for line in about.__doc__.splitlines() if "embodrl plan" in line]
    assert sorted(shlex.split(example)[2:]) == sorted(arguments)
    code, plan = plan_json(*arguments[1:])
    assert code == 0 and plan["fits"] and plan["num_parameters"] > 7e9
    assert "fit_trains_adapters" in plan and not plan["fit_trains_adapters"]


def test_machines_that_are_not_alike_are_shown_and_have_memory_of_their_own():
    group = "{label: cards, node_ranks: 1, hardware: {name: 4xl40, num_gpus: 4, gpu_memory_gib: 48, memory_gib: 256}}"
    arguments = (
        *("env=toy", "model=openvla", "cluster=8xh100", "cluster.num_nodes=2", "cluster.launcher=ray", "actor=fsdp"),
        *(f"cluster.node_groups=[{group}]", "actor.micro_batch_size=5", "env.num_processes=4"),
        "cluster.component_placement={actor:0-7,rollout:cards/0-3,env:cards/0-3}",
    )
    result = CLI.invoke(app, ["plan", "train", *arguments])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith("8xh100 (described): 1 node(s) (0) with") and lines[0].endswith("8 GPU(s)")
    assert lines[1] == "4xl40 (described): 1 node(s) (1) with 2 cores, 1 NUMA node(s), 4 GPU(s)"
    plan = plan_of(*arguments)
    there = {(memory.node, memory.device): memory.available for memory in plan.memory.memories}
    assert there[1, 0] == 48 * GIB and there[1, HOST] == 256 * GIB and there[0, 0] > 79 * GIB
    assert json.loads(CLI.invoke(app, ["plan", "train", *arguments, "--json"]).stdout)["machines"] == [
        {"name": "8xh100", "nodes": [0]},
        {"name": "4xl40", "nodes": [1]},
    ]
