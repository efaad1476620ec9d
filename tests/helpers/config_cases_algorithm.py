"""Wrong configurations of algorithms and rewards."""

from __future__ import annotations

from config_case import Wrong

WITHOUT_CRITIC = ("algorithm.loss_type=actor", "model.add_value_head=false", "actor.optim.critic_warmup_iterations=0")

ALGORITHMS = [
    Wrong("estimator of no module", "algorithm.adv_type", "no_such_module", ("algorithm.adv_type='no_such_module:f'",)),
    Wrong("estimator without a name", "algorithm.adv_type", "module:attribute", ("algorithm.adv_type='math:'",)),
    Wrong("loss that is no function", "algorithm.loss_type", "not a function", ("algorithm.loss_type='math:pi'",)),
    Wrong(
        "loss of another kind",
        "algorithm.loss_type",
        "has an unknown parameter",
        ("algorithm.loss_type='difflib:ndiff'",),
    ),
    Wrong(
        "group estimator without groups",
        "algorithm.group_size",
        "can't be compared",
        ("algorithm.adv_type=grpo", *WITHOUT_CRITIC, "env.train.ignore_terminations=true"),
    ),
    Wrong(
        "group estimator whose groups drift apart",
        "env.train.auto_reset",
        "adv_type 'grpo' compares",
        ("algorithm.adv_type=grpo", *WITHOUT_CRITIC, "algorithm.group_size=8"),
    ),
    Wrong(
        "normalisation over groups that drift apart",
        "env.train.auto_reset",
        "normalization_scope 'group' compares",
        ("algorithm.normalization_scope=group", "algorithm.group_size=8"),
    ),
    Wrong(
        "normalisation over groups of one",
        "algorithm.group_size",
        "always gives 0",
        ("algorithm.normalization_scope=group", "env.train.ignore_terminations=true"),
    ),
    Wrong("filter of groups of one", "algorithm.group_size", "would drop either", ("algorithm.filter.enabled=true",)),
    Wrong(
        "filter that lets nothing through",
        "algorithm.filter.max_rate",
        "no success rate of 4 episodes",
        ("algorithm.filter={enabled: true,min_rate: 0.3,max_rate: 0.4}", "algorithm.group_size=4"),
    ),
    Wrong("dual clip within the clip", "algorithm.clip_ratio_dual", "cut into it", ("algorithm.clip_ratio_dual=1.1",)),
    Wrong("decoupled as a number", "algorithm.decoupled", "not a mapping", ("algorithm.decoupled=2",)),
    Wrong(
        "cap that fresh data reach",
        "algorithm.decoupled.cap",
        "a number above 1 or null",
        ("algorithm.decoupled.cap=1",),
    ),
    Wrong("unknown way to cap", "algorithm.decoupled.on_exceed", "mask, clamp", ("algorithm.decoupled.on_exceed=cut",)),
    Wrong(
        "unknown proximal policy",
        "algorithm.decoupled.prox",
        "recompute, loglinear",
        ("algorithm.decoupled.prox=recomputed",),
    ),
    Wrong("unknown weight level", "algorithm.decoupled.level", "episode", ("algorithm.decoupled.level=action",)),
    Wrong(
        "weight finer than the ratio",
        "algorithm.decoupled.level",
        "per token",
        ("algorithm.logprob_type=action_level", "algorithm.decoupled.enabled=true"),
    ),
    Wrong(
        "episodes within minibatches",
        "algorithm.decoupled.prox",
        "minibatch",
        ("algorithm.decoupled={enabled: true,prox: loglinear,level: episode}",),
    ),
    Wrong(
        "loss without behaviour weights",
        "algorithm.loss_type",
        "prox_logprobs or behavior_weights",
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
        "ref_logprobs or kl_coef",
        (
            "algorithm.loss_type='test_user_functions:plain_loss'",
            "algorithm.adv_type=reinforce_pp",
            *WITHOUT_CRITIC[1:],
            "algorithm.kl.coef=0.1",
        ),
    ),
    Wrong("reward of no module", "reward.fn", "no_such_module", ("reward.fn='no_such_module:f'",)),
    Wrong("reward that is no function", "reward.fn", "not a function", ("reward.fn='math:pi'",)),
    Wrong("two rewards", "reward.fn", "SRPO replaces", ("reward.fn='math:fsum'", "algorithm.srpo.enabled=true")),
    Wrong(
        "encoder without weights",
        "algorithm.srpo.encoder_path",
        "config.json",
        ("algorithm.srpo={enabled: true,encoder: vjepa2}",),
    ),
    Wrong(
        "encoder that is not there",
        "algorithm.srpo.encoder",
        "module:attribute",
        ("algorithm.srpo={enabled: true,encoder: resnet}",),
    ),
    Wrong("unknown KL estimator", "algorithm.kl.estimator", "k1, k2, k3", ("algorithm.kl.estimator=k4",)),
    Wrong("misspelt pipeline", "pipeline.name", "nearest:  grpo", ("pipeline.name=gprpo",)),
    Wrong("two pipelines", "pipeline.fn", "exclude each other", ("pipeline.fn='math:fsum'", "pipeline.name=ppo")),
    Wrong("pipeline of no module", "pipeline.fn", "no_such_module", ("pipeline.fn='no_such_module:f'",)),
    Wrong("pipeline that is no function", "pipeline.fn", "not a function", ("pipeline.fn='math:pi'",)),
    Wrong("pipeline that is none", "pipeline.fn", "returned str, not a Pipeline", ("pipeline.fn='builtins:repr'",)),
    Wrong("pipeline that fails", "pipeline.fn", "raised TypeError", ("pipeline.fn='math:fsum'",)),
    Wrong(
        "another algorithm's pipeline", "pipeline.name", "belongs to algorithm.adv_type=rloo", ("pipeline.name=rloo",)
    ),
    Wrong("sampling, no filter", "pipeline.name", "algorithm.filter.enabled=true, and it is", ("pipeline.name=dapo",)),
    Wrong(
        "filter without sampling",
        "pipeline.name",
        "needs a node of the role 'dynamic_sampling'",
        ("pipeline.name=ppo", "algorithm.filter.enabled=true", "algorithm.group_size=8"),
    ),
    Wrong("function among the presets", "pipeline", "pipeline.fn=my.module:build", ("pipeline='my.module:build'",)),
    Wrong(
        "offload beside rollouts",
        "actor.enable_offload",
        "rollouts are played while the policy trains",
        ("actor.enable_offload=true", "runner.max_staleness=1"),
    ),
    Wrong(
        "simulators that leave beside training",
        "env.enable_offload",
        "rollouts are played while the policy trains",
        ("env.enable_offload=true", "runner.max_staleness=2"),
    ),
    Wrong(
        "rollouts that leave beside training",
        "rollout.enable_offload",
        "set it to false, or runner.max_staleness to 0",
        ("rollout.enable_offload=true", "actor.own_process=true", "runner.max_staleness=1"),
    ),
    Wrong(
        "GPU physics that leaves",
        "env.enable_offload",
        "closely, but not bit-exactly",
        ("env.enable_offload=true", "env.sim_backend=physx_cuda", "cluster.device=cuda", "env.num_processes=1"),
    ),
    Wrong(
        "offload of what is offloaded",
        "actor.enable_offload",
        "in main memory already",
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
