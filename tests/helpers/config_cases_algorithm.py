"""Wrong configurations of algorithms and rewards."""

from __future__ import annotations

from config_case import Wrong

WITHOUT_CRITIC = ("algorithm.loss_type=actor", "model.add_value_head=false", "actor.optim.critic_warmup_iterations=0")
BRANCH = ("algorithm=branch", "actor.optim.critic_warmup_iterations=0", "env.train.max_steps_per_rollout_epoch=50")

ALGORITHMS = [
    Wrong(
        "estimator of no module",
        "algorithm.adv_type",
        "parts-are-registered",
        ("algorithm.adv_type='no_such_module:f'",),
        names="no_such_module",
    ),
    Wrong(
        "estimator without a name",
        "algorithm.adv_type",
        "parts-are-registered",
        ("algorithm.adv_type='math:'",),
        names="module:attribute",
    ),
    Wrong(
        "loss that is not a function", "algorithm.loss_type", "parts-are-registered", ("algorithm.loss_type='math:pi'",)
    ),
    Wrong(
        "loss of another kind",
        "algorithm.loss_type",
        "parts-are-registered",
        ("algorithm.loss_type='difflib:ndiff'",),
    ),
    Wrong(
        "group estimator without groups",
        "algorithm.group_size",
        "groups-for-group-estimators",
        ("algorithm.adv_type=grpo", *WITHOUT_CRITIC, "env.train.ignore_terminations=true"),
    ),
    Wrong(
        "group estimator whose groups drift apart",
        "env.train.auto_reset",
        "groups-keep-step",
        ("algorithm.adv_type=grpo", *WITHOUT_CRITIC, "algorithm.group_size=8"),
    ),
    Wrong(
        "normalisation over groups that drift apart",
        "env.train.auto_reset",
        "groups-keep-step",
        ("algorithm.normalization_scope=group", "algorithm.group_size=8"),
    ),
    Wrong(
        "normalisation over groups of one",
        "algorithm.group_size",
        "groups-for-normalization",
        ("algorithm.normalization_scope=group", "env.train.ignore_terminations=true"),
    ),
    Wrong(
        "groups whose rows are drawn",
        "algorithm.pf_ppo.method",
        "rows-are-drawn-for-ppo",
        (
            "algorithm.pf_ppo.method=pow",
            "algorithm.adv_type=grpo",
            *WITHOUT_CRITIC,
            "algorithm.group_size=8",
            "env.train.auto_reset=false",
            "env.train.max_steps_per_rollout_epoch=50",
        ),
        names="grpo",
    ),
    Wrong(
        "filter of groups of one", "algorithm.group_size", "filter-keeps-something", ("algorithm.filter.enabled=true",)
    ),
    Wrong(
        "filter that lets nothing through",
        "algorithm.filter.max_rate",
        "filter-keeps-something",
        ("algorithm.filter={enabled: true,min_rate: 0.3,max_rate: 0.4}", "algorithm.group_size=4"),
    ),
    Wrong(
        "branches with a critic",
        "algorithm.adv_type",
        "branches-can-be-compared",
        ("algorithm.branch.enabled=true", "algorithm.group_size=8"),
        names="rloo",
    ),
    Wrong(
        "branches ahead of training",
        "runner.max_staleness",
        "branches-can-be-compared",
        ("runner.max_staleness=1", *BRANCH),
    ),
    Wrong(
        "branches of a workflow",
        "rollout.workflow",
        "branches-can-be-compared",
        ("rollout.workflow='embodrl.workers.workflows.workflow:ChunkWorkflow'", *BRANCH),
    ),
    Wrong(
        "branches of one simulator for all",
        "env.sim_backend",
        "branches-can-be-compared",
        ("env.sim_backend=physx_cuda", "cluster.device=cuda", "env.num_processes=1", *BRANCH),
        names="physx_cuda",
    ),
    Wrong(
        "branches at the end of episodes",
        "algorithm.branch.max_chunks",
        "branches-begin-within-episodes",
        ("model.num_action_chunks=5", "algorithm.branch.max_chunks=10", *BRANCH),
        names="9",
    ),
    Wrong(
        "branches within a chunk",
        "model.num_action_chunks",
        "branches-begin-within-episodes",
        ("model.num_action_chunks=50", "actor={global_batch_size: 64,micro_batch_size: 8}", *BRANCH),
    ),
    Wrong(
        "dual clip within the clip",
        "algorithm.clip_ratio_dual",
        "dual-clip-is-the-outer-one",
        ("algorithm.clip_ratio_dual=1.1",),
    ),
    Wrong("decoupled as a number", "algorithm.decoupled", "config-type", ("algorithm.decoupled=2",)),
    Wrong(
        "weight finer than the ratio",
        "algorithm.decoupled.level",
        "decoupled-level-fits",
        ("algorithm.logprob_type=action_level", "algorithm.decoupled.enabled=true"),
    ),
    Wrong(
        "episodes within minibatches",
        "algorithm.decoupled.prox",
        "decoupled-level-fits",
        ("algorithm.decoupled={enabled: true,prox: loglinear,level: episode}",),
        names="minibatch",
    ),
    Wrong(
        "float32 copies of float32 weights",
        "actor.optim.master_weights",
        "masters-have-a-use",
        ("actor.optim.master_weights=true",),
    ),
    Wrong(
        "recomputed log-probs between two policies",
        "algorithm.decoupled.prox",
        "recomputed-is-not-interpolated",
        ("algorithm.decoupled={enabled: true,prox: loglinear}", "algorithm.recompute_logprobs=true"),
    ),
    Wrong(
        "loss without behaviour weights",
        "algorithm.loss_type",
        "decoupled-reaches-the-loss",
        (
            "algorithm.loss_type='test_user_functions:plain_loss'",
            "algorithm.adv_type=reinforce_pp",
            *WITHOUT_CRITIC[1:],
            "algorithm.decoupled.enabled=true",
        ),
    ),
    Wrong(
        "loss without a KL",
        "algorithm.loss_type",
        "kl-reaches-the-loss",
        (
            "algorithm.loss_type='test_user_functions:plain_loss'",
            "algorithm.adv_type=reinforce_pp",
            *WITHOUT_CRITIC[1:],
            "algorithm.kl.coef=0.1",
        ),
    ),
    Wrong(
        "reward of no module",
        "reward.fn",
        "reward-function-exists",
        ("reward.fn='no_such_module:f'",),
        names="no_such_module",
    ),
    Wrong("reward that is not a function", "reward.fn", "reward-function-exists", ("reward.fn='math:pi'",)),
    Wrong("two rewards", "reward.fn", "one-reward", ("reward.fn='math:fsum'", "algorithm.srpo.enabled=true")),
    Wrong(
        "encoder without weights",
        "algorithm.srpo.encoder_path",
        "encoder-exists",
        ("algorithm.srpo={enabled: true,encoder: vjepa2}",),
        names="config.json",
    ),
    Wrong(
        "encoder that is not there",
        "algorithm.srpo.encoder",
        "encoder-exists",
        ("algorithm.srpo={enabled: true,encoder: resnet}",),
        names="module:attribute",
    ),
    Wrong(
        "misspelt pipeline", "pipeline.name", "pipeline-is-registered", ("pipeline.name=of_policy",), names="off_policy"
    ),
    Wrong("algorithm as a pipeline", "pipeline", "preset-unknown", ("pipeline=grpo",), names="algorithm=grpo"),
    Wrong("two pipelines", "pipeline.fn", "name-or-function", ("pipeline.fn='math:fsum'", "pipeline.name=on_policy")),
    Wrong(
        "pipeline of no module",
        "pipeline.fn",
        "function-import",
        ("pipeline.fn='no_such_module:f'",),
        names="no_such_module",
    ),
    Wrong("pipeline that is not a function", "pipeline.fn", "function-not-callable", ("pipeline.fn='math:pi'",)),
    Wrong("pipeline that is none", "pipeline.fn", "pipeline-fn-type", ("pipeline.fn='builtins:repr'",)),
    Wrong("pipeline that fails", "pipeline.fn", "pipeline-fn-raised", ("pipeline.fn='math:fsum'",)),
    Wrong("algorithm as a name", "pipeline.name", "pipeline-is-registered", ("pipeline.name=rloo",), names="=rloo"),
    Wrong("store, none drawn", "pipeline.name", "pipeline-role-unused", ("pipeline.name=off_policy",)),
    Wrong(
        "buffer without a store",
        "pipeline.name",
        "pipeline-role-needed",
        ("pipeline.name=on_policy", "algorithm=sac", "model=mlp", "model.warm_start=null"),
        more=("actor.optim.critic_warmup_iterations",),
    ),
    Wrong(
        "function among the presets",
        "pipeline",
        "preset-unknown",
        ("pipeline='my.module:build'",),
        names="pipeline.fn=my.module:build",
    ),
    Wrong(
        "offload beside rollouts",
        "actor.enable_offload",
        "offload-needs-turns",
        ("actor.enable_offload=true", "runner.max_staleness=1"),
    ),
    Wrong(
        "simulators that leave beside training",
        "env.enable_offload",
        "offload-needs-turns",
        ("env.enable_offload=true", "runner.max_staleness=2"),
    ),
    Wrong(
        "rollouts that leave beside training",
        "rollout.enable_offload",
        "offload-needs-turns",
        ("rollout.enable_offload=true", "actor.own_process=true", "runner.max_staleness=1"),
    ),
    Wrong(
        "GPU physics that leaves",
        "env.enable_offload",
        "simulators-come-back-bit-exactly",
        ("env.enable_offload=true", "env.sim_backend=physx_cuda", "cluster.device=cuda", "env.num_processes=1"),
    ),
    Wrong(
        "offload of what is offloaded",
        "actor.enable_offload",
        "main-memory-has-no-offload",
        (
            "actor.enable_offload=true",
            "actor=fsdp",
            "actor.fsdp.cpu_offload=true",
            "cluster=1xh200",
            "cluster.device=cuda",
        ),
        more=("cluster.hardware.name",),
    ),
]
