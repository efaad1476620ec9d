"""Wrong configurations: what is given, which key the report must name, and what it must say about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wrong:
    """A wrong configuration.

    Attributes:
        name: what is wrong.
        key: the key that the report names.
        says: a part of the report's paragraph about that key.
        args: command-line arguments.
        text: content of a file given with --config; None for no file.
        line: line of the file that the report names; 0 if the origin is the first argument.
        more: further keys that the report names, because they are wrong for the same reason.
    """

    name: str
    key: str
    says: str
    args: tuple[str, ...] = ()
    text: str | None = None
    line: int = 0
    more: tuple[str, ...] = ()


# Cases do arithmetic with these, whatever the presets say.
BASE = (
    "env.tasks=[PushCube-v1]",
    "env.max_episode_steps=50",
    "env.num_processes=2",
    "env.train.total_num_envs=32",
    "env.train.max_steps_per_rollout_epoch=100",
    "env.eval.total_num_envs=32",
    "env.eval.num_episodes=128",
    "env.eval.seed=1000000",
    "model.num_action_chunks=5",
    "model.warm_start=null",
    "model.architecture.image_size=64",
    "model.architecture.patch_size=8",
    "model.architecture.dino.width=96",
    "model.architecture.dino.num_heads=3",
    "model.architecture.hidden_size=192",
    "model.architecture.num_attention_heads=6",
    "algorithm.rollout_epoch=1",
    "actor.global_batch_size=160",
    "actor.micro_batch_size=80",
    "actor.optim.critic_warmup_iterations=2",
    "actor.optim.lr_warmup_iterations=4",
    "runner.max_iterations=60",
    "collect.num_episodes=400",
    "sft.max_steps=1000",
)

FORM = [
    Wrong("misspelt key", "algorithm.gama", "algorithm.gamma", ("algorithm.gama=0.9",)),
    Wrong("misspelt key with plus", "runner.sed", "runner.seed", ("+runner.sed=3",)),
    Wrong("misspelt key with plus plus", "runner.sed", "runner.seed", ("++runner.sed=3",)),
    Wrong("misspelt section", "algoritm", "nearest:  algorithm", ("algoritm.gamma=0.9",)),
    Wrong("key without its section", "gamma", "nearest:  algorithm.gamma", ("gamma=0.9",)),
    Wrong("key in the wrong section", "env.group_size", "nearest:  algorithm.group_size", ("env.group_size=4",)),
    Wrong(
        "misspelt key in a file",
        "env.trian",
        "env.train",
        text="runner:\n  seed: 1\nenv:\n  trian: {seed: 3}\n",
        line=4,
    ),
    Wrong(
        "key in a list item",
        "env.cameras.0.hight",
        "height",
        text="env:\n  cameras:\n    - name: a\n      hight: 64\n",
        line=4,
    ),
    Wrong("misspelt group", "modle", "nearest:  model", ("modle=openvla",)),
    Wrong("misspelt preset", "env", "nearest:  maniskill", ("env=maniskil",)),
    Wrong("misspelt preset in a file", "model", "openvla_7b", text="presets:\n  model: openvla_7c\n", line=2),
    Wrong("unknown group in a file", "modl", "nearest:  model", text="presets: {modl: openvla}\n", line=1),
    Wrong("presets that are a list", "presets", "presets: {env:", text="presets: [maniskill]\n", line=1),
    Wrong("a defaults list in a file", "defaults", "presets: {env:", text="defaults: [{env: maniskill}]\n", line=1),
    Wrong("preset path", "env", "is a path", ("env=../../secret",)),
    Wrong("preset file name", "env", "is a path", ("env=maniskill.yaml",)),
    Wrong("group path", "env/deep", "no preset group", ("env/deep=x",)),
    Wrong("no preset", "env", "no preset 'null'", ("env=null",)),
    Wrong("preset in another place", "env@env.train", "with '@'", ("env@env.train=maniskill",)),
    Wrong("hydra's own settings", "hydra.run.dir", "Hydra's own", ("hydra.run.dir=/tmp",)),
    Wrong("text for an integer", "runner.seed", "without quotes", ("runner.seed='3'",)),
    Wrong("word for an integer", "runner.seed", "the text 'three' is not an integer", ("runner.seed=three",)),
    Wrong("true for an integer", "runner.seed", "true is not an integer", ("runner.seed=true",)),
    Wrong("float for an integer", "runner.max_iterations", "3.0 is not an integer", ("runner.max_iterations=3.0",)),
    Wrong("yes for a boolean", "env.pin_cpus", "write true or false", text="env:\n  pin_cpus: yes\n", line=2),
    Wrong("one for a boolean", "env.pin_cpus", "true or false", ("env.pin_cpus=1",)),
    Wrong("number for text", "runner.name", "quotes", ("runner.name=7",)),
    Wrong("word for a list", "env.tasks", "[PushCube-v1]", ("env.tasks=PushCube-v1",)),
    Wrong("number for a section", "env.train", "is not a mapping", ("env.train=3",)),
    Wrong("null for a section", "env.train", "is not a mapping", ("env.train=null",)),
    Wrong("list for a number", "actor.optim.lr", "is not a number", ("actor.optim.lr=[1e-3]",)),
    Wrong("too few items", "env.cameras", "too few", ("env.cameras=[]",)),
    Wrong("wrong number of items", "env.cameras.0.eye", "3 items", ("env.cameras=[{eye:[0,1],target:[0,0,0]}]",)),
    Wrong("below the range", "runner.max_iterations", "above 0", ("runner.max_iterations=0",)),
    Wrong("above the range", "algorithm.gamma", "at most 1", ("algorithm.gamma=1.5",)),
    Wrong("huge seed", "runner.seed", "at most 2147483647", ("runner.seed=3000000000",)),
    Wrong("nan", "algorithm.gamma", "finite", text="algorithm:\n  gamma: .nan\n", line=2),
    Wrong("infinity", "algorithm.value_clip", "or null", ("algorithm.value_clip=inf",)),
    Wrong("enumeration", "algorithm.reward_type", "nearest:  chunk_level", ("algorithm.reward_type=chunklevel",)),
    Wrong("enumeration or number", "env.mesh_decimation", "or auto", ("env.mesh_decimation=automatic",)),
    Wrong("code from checkpoints", "model.trust_remote_code", "allowed:  false", ("model.trust_remote_code=true",)),
    Wrong("several machines", "cluster.num_nodes", "allowed:  1", ("cluster.num_nodes=2",)),
    Wrong("missing value", "env.env_type", "is missing", text="env:\n  env_type: ???\n", line=2),
    Wrong("duplicate key", "runner.seed", "first in line 2", text="runner:\n  seed: 1\n  seed: 2\n", line=3),
    Wrong("target", "model._target_", "never builds objects", ("model._target_=os.system",)),
    Wrong(
        "partial", "env.cameras.0._partial_", "never builds", text="env:\n  cameras:\n    - {_partial_: true}\n", line=3
    ),
    Wrong("python tag", "runner.name", "tag", text="runner:\n  name: !!python/object/apply:os.getcwd []\n", line=2),
    Wrong("yaml merge key", "runner.<<", "merge key", text="runner:\n  <<: {seed: 3}\n", line=2),
    Wrong("dotted key in a file", "runner.seed", "nested", text="runner.seed: 3\n", line=1),
    Wrong("dotted key in a mapping", "runner.a.b", "nested", ("runner={a.b: 3}",)),
    Wrong("malformed yaml", "(file)", "is not YAML", text="runner: {seed: 3\nenv: x\n", line=2),
    Wrong("tab in yaml", "(file)", "is not YAML", text="runner:\n\tseed: 3\n", line=2),
    Wrong("yaml list", "(file)", "is not a mapping", text="- 1\n", line=1),
    Wrong(
        "two documents", "(file)", "several YAML documents", text="runner: {seed: 1}\n---\nrunner: {seed: 2}\n", line=3
    ),
    Wrong("argument without value", "runner.seed", "key=value", ("runner.seed",)),
    Wrong("two equal signs", "runner.seed", "can't be parsed", ("runner.seed=1=2",)),
    Wrong("open bracket", "env.tasks", "can't be parsed", ("env.tasks=[PushCube-v1",)),
    Wrong("sweep", "runner.seed", "sweep", ("runner.seed=1,2",)),
    Wrong("list item", "env.cameras.0.name", "whole list", ("env.cameras.0.name=top",)),
    Wrong("key below a number", "runner.seed.x", "single value", ("runner.seed.x=1",)),
    Wrong("unknown reference", "runner.name", "nearest:  runner.seed", ("runner.name=${runner.sed}",)),
    Wrong("reference to itself", "runner.name", "circle", ("runner.name=${runner.name}",)),
    Wrong("resolver", "runner.name", "resolver", ("runner.name=${oc.env:HOME}",)),
    Wrong("unknown extension", "extensions", "no module", ("extensions=[no_such_module_at_all]",)),
    Wrong("extension that is code", "extensions", "not the name of a module", ("extensions=['os:system']",)),
]

FORM += [
    Wrong("preset in place of a section", "env", "presets: {env: maniskill}", text="env: maniskill\n", line=1),
    Wrong("unknown key taken back", "runner.sed", "nearest:  runner.seed", ("~runner.sed",)),
    Wrong("taken back with a value", "~env.tasks", "write ~key alone", ("~env.tasks=[x]",)),
    Wrong("nothing taken back", "~", "key=value", ("~",)),
    Wrong("no key", "(argument)", "key=value", ("=3",)),
    Wrong("home directory unquoted", "runner.output_dir", "near '~'", ("runner.output_dir=~/x",)),
    Wrong("zero byte", "(file)", "special characters", text="runner: {seed: 3}\n# \0\n", line=2),
]

RULES = [
    Wrong(
        "train environments and processes",
        "env.train.total_num_envs",
        "33 / 2 leaves 1",
        ("env.train.total_num_envs=33",),
        more=("actor.global_batch_size",),
    ),
    Wrong(
        "eval environments and processes",
        "env.eval.total_num_envs",
        "set it to 8 or 10",
        ("env.eval.total_num_envs=9",),
    ),
    Wrong("stages and processes", "rollout.pipeline_stages", "2 / 4 leaves 2", ("rollout.pipeline_stages=4",)),
    Wrong("groups and processes", "algorithm.group_size", "= 16 a process", ("algorithm.group_size=3",)),
    Wrong(
        "groups and tasks",
        "env.train.total_num_envs",
        "1 initial states for 2 tasks",
        ("algorithm.group_size=32", "env.tasks=[PushCube-v1,PullCube-v1]", "env.num_processes=1"),
    ),
    Wrong(
        "chunks and rollout",
        "env.train.max_steps_per_rollout_epoch",
        "set it to 90 or 95",
        ("env.train.max_steps_per_rollout_epoch=93",),
    ),
    Wrong("chunks and episode", "env.max_episode_steps", "52 / 5 leaves 2", ("env.max_episode_steps=52",)),
    Wrong(
        "chunk longer than the episode",
        "model.num_action_chunks",
        "longer than env.max_episode_steps",
        ("model.num_action_chunks=100",),
        more=("actor.global_batch_size",),
    ),
    Wrong(
        "rollout past the only episode",
        "env.train.max_steps_per_rollout_epoch",
        "the other 50",
        ("env.train.auto_reset=false",),
    ),
    Wrong(
        "ignored ends and sparse rewards",
        "env.train.ignore_terminations",
        "dense_delta",
        ("env.train.ignore_terminations=true", "env.reward_mode=sparse"),
    ),
    Wrong(
        "no reward at all", "env.success_bonus", "never any reward", ("env.success_bonus=0", "env.reward_mode=sparse")
    ),
    Wrong("unknown environment", "env.env_type", "nearest:  maniskill", ("env.env_type=manyskill",)),
    Wrong("unknown task", "env.tasks", "nearest:  PushCube-v1", ("env.tasks=[PushCube]",)),
    Wrong("task named twice", "env.tasks", "named twice", ("env.tasks=[PushCube-v1,PushCube-v1]",)),
    Wrong("action dimensions", "model.action_dim", "set it to 7", ("model.action_dim=8",)),
    Wrong(
        "episodes and tasks",
        "env.eval.num_episodes",
        "can't cover 2 tasks",
        ("env.eval.num_episodes=1", "env.tasks=[PushCube-v1,PullCube-v1]"),
    ),
    Wrong(
        "demonstration seeds in the evaluation",
        "collect.seed",
        "995000 to 1004999, which overlap",  # 10 attempts for each of 1000 episodes
        ("collect.seed=995000", "collect.num_episodes=1000"),
    ),
    Wrong(
        "evaluation seeds in the demonstrations",
        "env.eval.seed",
        "500000 to 500399, which overlap",
        ("env.eval.seed=500399", "collect.num_episodes=40"),
    ),
    Wrong("several cameras", "env.cameras", "sees 1 camera", ("env.cameras=[{name: a},{name: b}]",)),
    Wrong(
        "cameras of one name",
        "env.cameras.1.name",
        "two cameras",
        text="env:\n  cameras:\n    - name: a\n    - name: a\n",
        line=4,
        more=("env.cameras",),
    ),
    Wrong(
        "cameras of two sizes",
        "env.cameras.1.height",
        "one size",
        text="env:\n  cameras:\n    - name: a\n    - name: b\n      height: 32\n",
        line=5,
        more=("env.cameras",),
    ),
    Wrong("field of view in degrees", "env.cameras.0.fov_rad", "1.05", ("env.cameras=[{fov_rad: 60}]",)),
    Wrong("eye without target", "env.cameras.0.eye", "give target", ("env.cameras=[{eye: [1,0,1]}]",)),
    Wrong(
        "camera that sees itself",
        "env.cameras.0.target",
        "own position",
        ("env.cameras=[{eye: [1,0,1],target: [1,0,1]}]",),
    ),
    Wrong(
        "GPU physics on a CPU",
        "env.sim_backend",
        "physx_cpu",
        ("env.sim_backend=physx_cuda", "cluster.device=cpu", "env.num_processes=1"),
    ),
    Wrong(
        "GPU physics and CPU pictures",
        "env.render_backend",
        "gpu",
        ("env.render_backend=cpu", "env.sim_backend=physx_cuda", "env.num_processes=1"),
    ),
    Wrong(
        "GPU physics in two processes",
        "env.num_processes",
        "set env.num_processes=1",
        ("env.num_processes=2", "env.sim_backend=physx_cuda"),
    ),
    Wrong("all triangles dropped", "env.mesh_decimation", "invisible", ("env.mesh_decimation=1",)),
    Wrong("no interpreter", "env.python", "is not a program", ("env.python=/no/such/python",)),
    Wrong("odd video", "env.video.width", "set it to 256", ("env.video.width=255",)),
    Wrong("unknown model", "model.model_type", "nearest:  openvla", ("model.model_type=openvl",)),
    Wrong("no checkpoint", "model.model_path", "no directory", ("model.model_path=/no/such/directory",)),
    Wrong(
        "no checkpoint in a directory that is there",
        "model.model_path",
        "no directory",
        ("model.model_path={tmp}/absent",),
    ),
    Wrong("checkpoint that is a file", "model.model_path", "is a file", ("model.model_path={tmp}/file",)),
    Wrong("no warm start", "model.warm_start", "nearest:  builtin", ("model.warm_start=buildin",)),
    Wrong("checkpoint without a policy", "model.model_path", "no config.json", ("model.model_path={tmp}",)),
    Wrong("warm start without a policy", "model.warm_start", "holds no policy", ("model.warm_start={tmp}",)),
    Wrong(
        "shipped weights of another size",
        "model.warm_start",
        "(hidden_size)",
        ("model.warm_start=builtin", "~model.architecture", "model.architecture.hidden_size=384"),
    ),
    Wrong("patches", "model.architecture.image_size", "set it to 64 or 72", ("model.architecture.image_size=65",)),
    Wrong(
        "vision heads", "model.architecture.dino.num_heads", "96 / 5 leaves 1", ("model.architecture.dino.num_heads=5",)
    ),
    Wrong(
        "language heads",
        "model.architecture.num_attention_heads",
        "192 / 7 leaves 3",
        ("model.architecture.num_attention_heads=7",),
    ),
    Wrong("odd head dimension", "model.architecture.hidden_size", "even", ("model.architecture.hidden_size=198",)),
    Wrong("no hidden layer", "model.value_head.hidden_sizes", "[512,128]", ("model.value_head.hidden_sizes=[]",)),
    Wrong("more bins than there are", "algorithm.sampling.top_k", "256 bins", ("algorithm.sampling.top_k=300",)),
    Wrong("one bin", "algorithm.sampling.top_k", "no gradient", ("algorithm.sampling.top_k=1",)),
    Wrong("unknown estimator", "algorithm.adv_type", "nearest:  gae", ("algorithm.adv_type=gea",)),
    Wrong("unknown loss", "algorithm.loss_type", "nearest:  actor_critic", ("algorithm.loss_type=actor-critic",)),
    Wrong("no value head", "model.add_value_head", "needs a value head", ("model.add_value_head=false",)),
    Wrong(
        "values that nothing trains",
        "algorithm.loss_type",
        "never trains them",
        ("algorithm.loss_type=actor",),
        more=("actor.optim.critic_warmup_iterations",),
    ),
    Wrong("critic without a loss", "algorithm.value_loss_coef", "above 0", ("algorithm.value_loss_coef=0",)),
    Wrong(
        "action rewards, chunk values",
        "model.value_head.output",
        "one value an action",
        ("model.value_head.output=chunk", "algorithm.reward_type=action_level"),
    ),
    Wrong(
        "chunk rewards, action values",
        "model.value_head.output",
        "one value a chunk",
        ("model.value_head.output=action",),
    ),
    Wrong(
        "action rewards, chunk ratios",
        "algorithm.logprob_type",
        "token_level, action_level",
        ("algorithm.logprob_type=chunk_level", "algorithm.reward_type=action_level", "model.value_head.output=action"),
    ),
    Wrong("lower clip of 1", "algorithm.clip_ratio_low", "below 1", ("algorithm.clip_ratio_low=1.0",)),
    Wrong(
        "rollout and batches",
        "actor.global_batch_size",
        "640 / 150 leaves 40",
        ("actor.global_batch_size=150", "actor.micro_batch_size=50"),
    ),
    Wrong("batch and micro batches", "actor.micro_batch_size", "set it to 40 or 80", ("actor.micro_batch_size=50",)),
    Wrong(
        "precisions", "rollout.precision", "no ratio starts at 1", ("rollout.precision=bf16", "actor.precision=fp32")
    ),
    Wrong(
        "bf16 weights in fp32",
        "actor.precision",
        "auto, bf16",
        ("actor.precision=fp32", "rollout.precision=fp32", "actor.param_dtype=bf16"),
    ),
    Wrong("beta of 1", "actor.optim.betas.1", "for ever", ("actor.optim.betas=[0.9,1.0]",)),
    Wrong(
        "critic's warm-up for ever",
        "actor.optim.critic_warmup_iterations",
        "never train",
        ("actor.optim.critic_warmup_iterations=60",),
    ),
    Wrong(
        "warm-up for ever", "actor.optim.lr_warmup_iterations", "at most 58", ("actor.optim.lr_warmup_iterations=59",)
    ),
    Wrong(
        "unknown component",
        "cluster.component_placement",
        "nearest:  actor",
        ("cluster.component_placement={actr:0,actor:0,rollout:0,env:all}",),
    ),
    Wrong(
        "component placed twice",
        "cluster.component_placement",
        "placed twice",
        text='cluster:\n  component_placement:\n    "actor,rollout": 0\n    "env,actor": all\n',
        line=4,
    ),
    Wrong(
        "component not placed",
        "cluster.component_placement",
        "no place is given for env",
        text='cluster:\n  component_placement: {"actor,rollout": all}\n',
        line=2,
    ),
    Wrong(
        "placement that can't be read",
        "cluster.component_placement",
        "ends before it starts",
        ("cluster.component_placement={actor:3-0,rollout:all,env:all}",),
    ),
    Wrong(
        "more devices than there are",
        "cluster.component_placement",
        "this machine offers 1",
        ("cluster.component_placement={env:0-3,actor:all,rollout:all}", "cluster.device=cpu"),
    ),
    Wrong(
        "parallel actor",
        "cluster.component_placement",
        "1 process on 1 device",
        ("cluster.component_placement={actor:'0:0-1',rollout:0,env:all}",),
    ),
    Wrong(
        "actor and rollout apart",
        "cluster.component_placement",
        "actor,rollout: 0",
        ("cluster.component_placement={actor:0,rollout:1,env:all}", "cluster.device=cuda"),
    ),
    Wrong("run name that escapes", "runner.name", "runner.name=escaped", ("runner.name=../escaped",)),
    Wrong("run name with blanks", "runner.name", "my-run", ("runner.name='my run'",)),
    Wrong("output is a file", "runner.output_dir", "is a file", ("runner.output_dir={tmp}/file",)),
    Wrong("output below a file", "sft.output_dir", "is a file", ("sft.output_dir={tmp}/file/below",)),
    Wrong("empty output", "collect.output_dir", "empty", ("collect.output_dir=''",)),
    Wrong(
        "nameless project",
        "runner.logger.wandb_project",
        "no name",
        ("runner.logger.wandb_project=''", "runner.logger.wandb_mode=offline"),
    ),
    Wrong(
        "fine-tuning that only warms up",
        "sft.lr_warmup_steps",
        "set it to 4",
        ("sft.lr_warmup_steps=50", "sft.max_steps=40"),
    ),
    Wrong("blurred targets", "sft.label_smoothing_bins", "below 128", ("sft.label_smoothing_bins=200",)),
    Wrong(
        "demonstrations and tasks",
        "collect.num_episodes",
        "can't cover 2",
        ("collect.num_episodes=1", "env.tasks=[PushCube-v1,PullCube-v1]"),
    ),
    Wrong("shift out of the picture", "sft.random_shift_px", "0 to 32", ("sft.random_shift_px=40",)),
]
