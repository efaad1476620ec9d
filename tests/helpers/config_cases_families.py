"""Wrong configurations of the model families; see config_cases.py."""

from __future__ import annotations

from config_case import Wrong

NFT = (
    *("algorithm.loss_type=nft", "algorithm.adv_type=reinforce_pp", "model.add_value_head=false"),
    "actor.optim.critic_warmup_iterations=0",
)
PLANNER = (
    *("model=planner", "rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'"),
    *("env.train.auto_reset=false", "env.train.max_steps_per_rollout_epoch=10"),
)
FAMILIES = [
    Wrong("patches of pi", "model.pi.patch_size", "pi-dimensions-fit", ("model.pi.patch_size=12", "model=pi0")),
    Wrong(
        "vision heads of pi",
        "model.pi.siglip.num_heads",
        "pi-dimensions-fit",
        ("model.pi.siglip.num_heads=5", "model=pi05"),
    ),
    Wrong("key heads of pi", "model.pi.num_kv_heads", "pi-dimensions-fit", ("model.pi.num_kv_heads=3", "model=pi0")),
    Wrong("odd heads of pi", "model.pi.head_dim", "pi-dimensions-fit", ("model.pi.head_dim=33", "model=pi0")),
    Wrong("odd expert of pi", "model.pi.expert_width", "pi-dimensions-fit", ("model.pi.expert_width=97", "model=pi0")),
    Wrong(
        "more actions than predicted",
        "model.num_action_chunks",
        "pi-dimensions-fit",
        ("model.num_action_chunks=10", "model=pi0"),
    ),
    Wrong(
        "no room for an action",
        "model.action_dim",
        "pi-dimensions-fit",
        ("model.action_dim=7", "model=pi0", "model.pi.max_action_dim=6"),
    ),
    Wrong(
        "no slot for a camera",
        "env.cameras",
        "pi-dimensions-fit",
        ("env.cameras=[{name: base_camera}, {name: b, eye: [1,1,1], target: [0,0,0]}]", "model=pi0"),
    ),
    Wrong(
        "heads of pi0-FAST",
        "model.pi0_fast.num_kv_heads",
        "pi0-fast-dimensions-fit",
        ("model.pi0_fast.num_kv_heads=3", "model=pi0_fast"),
    ),
    Wrong(
        "an advantage for each action of pi0-FAST",
        "algorithm.reward_type",
        "tokens-are-of-the-chunk",
        ("algorithm.reward_type=action_level", "model.value_head.output=action", "model=pi0_fast"),
        more=("model.value_head.output",),
    ),
    Wrong(
        "patches of GR00T",
        "model.gr00t.patch_size",
        "gr00t-dimensions-fit",
        ("model.gr00t.patch_size=12", "model=gr00t"),
    ),
    Wrong(
        "heads of GR00T",
        "model.gr00t.num_key_value_heads",
        "gr00t-dimensions-fit",
        ("model.gr00t.num_key_value_heads=3", "model=gr00t"),
    ),
    Wrong(
        "widths of GR00T",
        "model.gr00t.vl_head_dim",
        "gr00t-dimensions-fit",
        ("model.gr00t.vl_head_dim=30", "model=gr00t"),
    ),
    Wrong(
        "no range of noise",
        "model.flow.noise_std_min",
        "noise-range-is-not-empty",
        ("model.flow.noise_std_min=0.2", "model=pi0", "model.flow.method=flow_noise"),
    ),
    Wrong(
        "a value that knows the actions",
        "model.value_head.input",
        "value-is-of-the-observation",
        ("model.value_head.input=suffix", "model=pi0", "algorithm=fpo"),
    ),
    Wrong(
        "FPO with log-probs",
        "model.flow.method",
        "loss-fits-the-sampling",
        ("model.flow.method=flow_sde", "model=pi0", "algorithm=fpo"),
    ),
    Wrong("FPO of tokens", "model.model_type", "loss-fits-the-family", ("algorithm.loss_type=fpo",)),
    Wrong(
        "mirrored velocities of a whole chain",
        "model.flow.method",
        "loss-fits-the-sampling",
        ("model.flow.method=flow_noise", "model=pi0", *NFT),
    ),
    Wrong(
        "velocities of a rollout that are not there",
        "model.flow.keep_errors",
        "loss-fits-the-sampling",
        ("model.flow.keep_errors=false", "model=pi0", *NFT),
    ),
    Wrong(
        "value input of flow policies",
        "model.value_head.input",
        "value-input-exists",
        ("model.value_head.input=suffix",),
    ),
    Wrong("no expert to train", "model.trainable", "part-can-train-alone", ("model.trainable=action_expert",)),
    Wrong(
        "proprioception without a state",
        "model.use_proprio",
        "state-is-there",
        ("model.use_proprio=true", "model=openvla_oft", "model.warm_start=null"),
        names="env.include_state",
    ),
    Wrong(
        "an L1 head under PPO",
        "model.action_head",
        "l1-head-has-no-density",
        ("model.action_head=l1", "model=openvla_oft", "model.warm_start=null"),
    ),
    Wrong(
        "weights that are not shipped",
        "model.warm_start",
        "family-has-shipped-weights",
        ("model.warm_start=builtin", "model=gr00t"),
    ),
]
DISCRETE = "model.gaussian.categorical"
DINOV2 = ("model.gaussian.frozen_encoder=facebook/dinov2-small", "model=cnn")
IQL = ("algorithm.loss_type=iql", "model=mlp", "algorithm=iql", "actor.optim.critic_warmup_iterations=0")
TD3_BC = ("algorithm=td3_bc", "actor.optim.critic_warmup_iterations=0")
DAGGER_ONLY = ("model=mlp", "algorithm=dagger", "actor.optim.critic_warmup_iterations=0")
DAGGER = (*DAGGER_ONLY, "model.num_action_chunks=1")
READS = "algorithm.off_policy.critic_reads"
SAC = ("model=mlp", "algorithm=sac", "actor.optim.critic_warmup_iterations=0")
HIL = (*SAC, "algorithm.off_policy.demos={tmp}", "algorithm.off_policy.demo_fraction=0.5")
GATED = "algorithm.dagger.gate_threshold=0.3"
PERSON = (*HIL, "model.num_action_chunks=1", "algorithm.off_policy.interventions=true", "env.num_processes=1")
FAMILIES += [
    Wrong(
        "discrete actions without gradients",
        DISCRETE,
        "discrete-actions-have-no-gradient",
        (f"{DISCRETE}=true", *SAC),
    ),
    Wrong(
        "interventions that nothing learns from",
        "algorithm.off_policy.interventions",
        "interventions-are-learned-from",
        ("algorithm.off_policy.interventions=true", GATED),
    ),
    Wrong(
        "interventions that no batch draws",
        "algorithm.off_policy.demo_fraction",
        "interventions-are-learned-from",
        ("algorithm.off_policy.interventions=true", *SAC, "model.num_action_chunks=1", GATED),
    ),
    Wrong(
        "interventions without a rule for them",
        "algorithm.dagger.gate_threshold",
        "interventions-are-learned-from",
        ("algorithm.off_policy.interventions=true", *HIL, "model.num_action_chunks=1"),
    ),
    Wrong(
        "an expert who takes control in the midst of a chunk",
        "model.num_action_chunks",
        "expert-labels-what-is-seen",
        ("model.num_action_chunks=5", *HIL, "algorithm.off_policy.interventions=true", GATED),
    ),
    Wrong(
        "a person without a clock who corrects what learns",
        "algorithm.off_policy.intervention_device",
        "device-of-interventions-is-there",
        ("algorithm.off_policy.intervention_device=keyboard", *PERSON, "env.train.total_num_envs=1"),
    ),
    Wrong(
        "an unknown device",
        "algorithm.off_policy.intervention_device",
        "device-of-interventions-is-there",
        ("algorithm.off_policy.intervention_device=keybord", *PERSON, "env.train.total_num_envs=1"),
        names="keybord",
    ),
    Wrong(
        "one person for several environments",
        "env.train.total_num_envs",
        "device-of-interventions-is-there",
        ("env.train.total_num_envs=4", *PERSON, "algorithm.off_policy.intervention_device=math:sqrt"),
    ),
]
FAMILIES += [
    Wrong(
        "a policy that sees nothing",
        "model.gaussian.use_images",
        "gaussian-policy-sees-something",
        ("env.include_state=false", "model=mlp"),
    ),
    Wrong(
        "another number of cameras",
        "model.gaussian.num_cameras",
        "gaussian-policy-sees-something",
        ("model.gaussian.num_cameras=2", "model=cnn"),
    ),
    Wrong(
        "an MLP without layers",
        "model.gaussian.hidden_sizes",
        "gaussian-layers-exist",
        ("model.gaussian.hidden_sizes=[]", "model=mlp"),
    ),
    Wrong(
        "more convolutions than a picture can be halved",
        "model.gaussian.channels",
        "gaussian-layers-exist",
        ("model.gaussian.channels=[4,4,4,4]", "model=cnn", "model.gaussian.image_size=8"),
    ),
    Wrong(
        "statistics that a Gaussian policy has not",
        "model.gripper",
        "gaussian-policy-has-plain-actions",
        ("model.gripper=bridge", "model=mlp"),
    ),
    Wrong(
        "no CNN to freeze",
        "model.freeze_vision",
        "frozen-vision-was-trained",
        ("model.freeze_vision=true", "model=mlp"),
    ),
    Wrong(
        "black pictures",
        "env.include_images",
        "pictures-are-drawn-for-those-who-look",
        ("env.include_images=false", "model=cnn"),
    ),
    Wrong(
        "a setting of evaluations that the simulator does not have",
        "env.eval.settings.suite",
        "evaluations-can-be-played",
        ("env.eval.settings={suite: libero_10}",),
    ),
    Wrong(
        "a protocol, and evaluations of another length",
        "env.eval.max_episode_steps",
        "evaluations-follow-what-is-given",
        ("env.eval.max_episode_steps=300", "env=libero_spatial", "model=openvla_oft", "protocol=openvla_oft"),
        more=("env.tasks",),
    ),
    Wrong(
        "an early stop after more evaluations than there are",
        "runner.stop_evaluations",
        "early-stop-can-happen",
        ("runner.stop_evaluations=50000", "runner.stop_at_success=0.9"),
    ),
    Wrong(
        "a state that the simulator does not tell",
        "env.state",
        "full-state-is-offered",
        ("env.state=full", "env=gymnasium_reacher", "model=mlp"),
    ),
    Wrong(
        "a state that is not observed",
        "env.state",
        "full-state-is-offered",
        ("env.state=full", "model=cnn", "env.include_state=false"),
    ),
    Wrong(
        "SAC with advantages",
        "algorithm.adv_type",
        "estimator-and-loss-agree",
        ("algorithm.adv_type=gae", *SAC),
    ),
    Wrong(
        "PPO without advantages",
        "algorithm.loss_type",
        "estimator-and-loss-agree",
        ("algorithm.adv_type=none",),
    ),
    Wrong(
        "SAC for token policies",
        "model.model_type",
        "actor-can-be-differentiated",
        ("model.model_type=openvla", *SAC),
        more=("env.include_images",),
    ),
    Wrong(
        "SAC that runs ahead", "runner.max_staleness", "off-policy-has-what-it-needs", ("runner.max_staleness=1", *SAC)
    ),
    Wrong(
        "SAC in half precision",
        "actor.precision",
        "off-policy-has-what-it-needs",
        ("actor.precision=bf16", *SAC),
        more=("rollout.precision",),
    ),
    Wrong(
        "a subset of more critics",
        "algorithm.off_policy.subset",
        "off-policy-numbers-fit",
        ("algorithm.off_policy.subset=3", *SAC),
    ),
    Wrong("state critics of a state actor", READS, "critics-may-read-the-state-alone", (f"{READS}=state", *SAC)),
    Wrong(
        "state critics without a state",
        "env.include_state",
        "critics-may-read-the-state-alone",
        (f"{READS}=state", *SAC, "model=cnn", "env.include_state=false"),
    ),
    Wrong(
        "more of the state than there is room for",
        "model.gaussian.seen_state_dim",
        "the-policy-reads-a-part-of-its-state",
        ("model.gaussian.seen_state_dim=65", "model=cnn"),
    ),
    Wrong(
        "shifts without pictures",
        "algorithm.off_policy.shift_pixels",
        "pictures-can-be-shifted",
        ("algorithm.off_policy.shift_pixels=4", *SAC),
    ),
    Wrong(
        "shifts of pictures that a frozen encoder has seen",
        "algorithm.off_policy.shift_pixels",
        "shifted-pictures-are-seen",
        ("algorithm.off_policy.shift_pixels=4", *SAC, *DINOV2, "model.gaussian.image_size=112"),
    ),
    Wrong(
        "a frozen encoder of no pictures",
        "model.gaussian.use_images",
        "frozen-encoder-fits",
        ("model.gaussian.use_images=false", *DINOV2, "model.gaussian.image_size=112"),
    ),
    Wrong(
        "a frozen encoder that is nowhere",
        "model.gaussian.frozen_encoder",
        "frozen-encoder-fits",
        ("model.gaussian.frozen_encoder=nowhere", "model=cnn", "model.gaussian.image_size=112"),
    ),
    Wrong("parts of patches", "model.gaussian.image_size", "frozen-encoder-fits", DINOV2, names="70"),
    Wrong(
        "shifts by more than a picture",
        "algorithm.off_policy.shift_pixels",
        "shifted-pictures-are-seen",
        ("algorithm.off_policy.shift_pixels=64", *SAC, "model=cnn"),
    ),
    Wrong(
        "critics without layers",
        "algorithm.off_policy.critic_hidden_sizes",
        "off-policy-numbers-fit",
        ("algorithm.off_policy.critic_hidden_sizes=[]", *SAC),
    ),
    Wrong(
        "RLPD without demonstrations",
        "algorithm.off_policy.demos",
        "off-policy-numbers-fit",
        ("algorithm.off_policy.demo_fraction=0.5", *SAC),
    ),
    Wrong(
        "demonstrations that no batch has",
        "algorithm.off_policy.demo_fraction",
        "off-policy-numbers-fit",
        ("algorithm.off_policy.demos={tmp}", *SAC),
    ),
    Wrong(
        "imitation beside PPO of nothing",
        "algorithm.bc_coef",
        "imitation-has-demonstrations",
        ("algorithm.bc_coef=0.1",),
    ),
    Wrong(
        "imitation beside PPO of what is not there",
        "algorithm.off_policy.demos",
        "imitation-has-demonstrations",
        ("algorithm.bc_coef=0.1", "algorithm.off_policy.demos={tmp}/none"),
    ),
    Wrong(
        "imitation of nothing",
        "algorithm.bc_coef",
        "imitation-has-demonstrations",
        ("algorithm.bc_coef=0.1", *SAC),
    ),
    Wrong(
        "demonstrations that a function does not pay",
        "reward.fn",
        "demonstrations-have-these-rewards",
        ("reward.fn=math:sqrt", "algorithm.off_policy={demos: {tmp}, demo_fraction: 0.5}", *SAC),
    ),
    Wrong(
        "a reward model that is not there",
        "reward.model",
        "reward-model-can-judge",
        ("reward.model={tmp}/none",),
    ),
    Wrong(
        "a small actor that PPO would train",
        "model.small_actor.kind",
        "small-actor-can-learn",
        ("model.small_actor.kind=residual",),
        more=("model.warm_start",),
    ),
    Wrong(
        "a small actor on random weights",
        "model.warm_start",
        "small-actor-can-learn",
        ("model.small_actor.kind=residual", *SAC),
    ),
    Wrong(
        "noise of a policy that has none",
        "model.model_type",
        "small-actor-can-learn",
        ("model.small_actor.kind=dsrl", *SAC),
        more=("model.warm_start",),
    ),
    Wrong(
        "noise of demonstrations",
        "algorithm.off_policy.demos",
        "noise-is-not-recorded",
        ("algorithm.off_policy.demos={tmp}", "model.small_actor.kind=dsrl", *SAC),
        more=("model.warm_start", "model.model_type", "algorithm.off_policy.demo_fraction"),
    ),
    Wrong(
        "RLT without its actor",
        "model.small_actor.kind",
        "rl-token-is-there",
        ("algorithm.loss_type=rlt", *SAC),
    ),
    Wrong(
        "an expert who labels chunks",
        "model.num_action_chunks",
        "expert-labels-what-is-seen",
        ("model.num_action_chunks=5", *DAGGER_ONLY),
    ),
    Wrong(
        "labels of ended episodes",
        "env.train.auto_reset",
        "expert-labels-what-is-seen",
        ("env.train.auto_reset=false", *DAGGER),
        more=("env.train.max_steps_per_rollout_epoch",),
    ),
    Wrong(
        "demonstrations beside labels",
        "algorithm.off_policy.demos",
        "expert-labels-what-is-seen",
        ("algorithm.off_policy.demos={tmp}", *DAGGER),
        more=("algorithm.off_policy.demo_fraction",),
    ),
    Wrong(
        "DAgger without experts",
        "env.env_type",
        "experts-show-the-tasks",
        ("env.env_type=gymnasium", *DAGGER),
        more=("env.id", "env.instruction", "env.reward_mode"),
    ),
    Wrong(
        "a replay buffer smaller than a rollout",
        "algorithm.off_policy.capacity",
        "replay-holds-a-rollout",
        ("algorithm.off_policy.capacity=100", *SAC),
    ),
    Wrong("IQL without data", "algorithm.off_policy.demos", "offline-has-data", IQL),
    Wrong(
        "IQL on data that are not there",
        "algorithm.off_policy.demos",
        "offline-has-data",
        ("algorithm.off_policy.demos={tmp}/none", *IQL),
    ),
    Wrong(
        "TD3+BC on tokens",
        "model.model_type",
        "td3-bc-has-an-actor",
        ("model.model_type=openvla", "algorithm.off_policy.demos={tmp}", "model=mlp", *TD3_BC),
        more=("env.include_images",),
    ),
    Wrong(
        "TD3+BC in bfloat16",
        "actor.precision",
        "td3-bc-has-an-actor",
        ("actor.precision=bf16", "algorithm.off_policy.demos={tmp}", "model=mlp", *TD3_BC),
        more=("rollout.precision",),
    ),
    Wrong(
        "RECAP without labels",
        "algorithm.offline.tag",
        "labels-are-there",
        (
            "algorithm.offline.tag=mine",
            "algorithm.off_policy.demos={tmp}",
            "algorithm=recap",
            "model=mlp",
            "actor.optim.critic_warmup_iterations=0",
        ),
    ),
    Wrong(
        "RECAP with a model of rewards",
        "algorithm.loss_type",
        "labels-need-no-rewards",
        (
            "reward.model={tmp}",
            "algorithm.off_policy.demos={tmp}",
            "algorithm=recap",
            "model=mlp",
            "actor.optim.critic_warmup_iterations=0",
        ),
        more=("algorithm.offline.tag", "reward.model"),
    ),
    Wrong(
        "IQL with rewards of its own",
        "reward.fn",
        "offline-has-what-it-needs",
        ("reward.fn=math:sqrt", "algorithm.off_policy.demos={tmp}", *IQL),
        more=("pipeline.name",),
    ),
    Wrong(
        "heads of a planner",
        "model.planner.num_attention_heads",
        "planner-heads-divide-its-width",
        ("model.planner.num_attention_heads=3", *PLANNER, "model.num_action_chunks=1"),
    ),
    Wrong(
        "experts of a checkpoint",
        "model.planner.num_experts",
        "a-checkpoint-has-its-experts",
        ("model.planner.num_experts=4", *PLANNER, "model.model_path={tmp}", "model.num_action_chunks=1"),
        more=("model.model_path",),
    ),
    Wrong(
        "a router's loss without a router",
        "algorithm.router_aux_loss_coef",
        "routers-can-be-balanced",
        ("algorithm.router_aux_loss_coef=0.001", *PLANNER, "model.num_action_chunks=1"),
    ),
    Wrong(
        "heads for which vLLM has no kernel",
        "model.planner.num_attention_heads",
        "vllm-has-kernels-for-its-heads",
        ("model.planner.num_attention_heads=4", *PLANNER, "model.num_action_chunks=1", "rollout=vllm"),
        more=("rollout.backend",),
    ),
    Wrong(
        "experts in vLLM",
        "model.planner.num_experts",
        "vllm-mixes-no-experts",
        (
            *("model.planner.num_experts=4", *PLANNER, "model.num_action_chunks=1", "rollout=vllm"),
            "model.planner.num_attention_heads=2",
        ),
        more=("rollout.backend",),
    ),
    Wrong(
        "processes of vLLM in a rollout process",
        "rollout.vllm.tensor_parallel_size",
        "one-process-has-the-processes-of-vllm",
        (
            *("rollout.vllm.tensor_parallel_size=2", *PLANNER, "model.num_action_chunks=1", "rollout=vllm"),
            *("model.planner.num_attention_heads=2", "rollout.own_process=true"),
        ),
        more=("rollout.backend",),
    ),
    Wrong(
        "prefixes of pictures",
        "rollout.vllm.enable_prefix_caching",
        "pictures-are-read-here-and-once",
        ("rollout.vllm.enable_prefix_caching=true", "rollout=vllm"),
        more=("rollout.backend",),
    ),
    Wrong(
        "a planner without a workflow",
        "rollout.workflow",
        "text-needs-a-workflow",
        ("rollout.workflow=null", "model=planner", "model.num_action_chunks=1"),
    ),
    Wrong(
        "an agent beside a workflow that calls none",
        "rollout.workflow",
        "agents-have-their-workflow",
        ("rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'", "rollout.agent=builtins:slice"),
        more=("env.train.auto_reset",),
    ),
    Wrong(
        "messages of several elements",
        "model.num_action_chunks",
        "a-message-is-a-chunk",
        ("model.num_action_chunks=2", *PLANNER),
    ),
    Wrong(
        "rewards of a message's actions",
        "algorithm.reward_type",
        "a-message-is-a-chunk",
        ("algorithm.reward_type=action_level", *PLANNER, "model.num_action_chunks=1"),
        more=("model.value_head.output",),
    ),
]
