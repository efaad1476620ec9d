"""Requirements of small actors on frozen policies. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from embodrl.config.rules.base import Context, path_kind, value_of
from embodrl.rule_set import Finding, RuleSet
from embodrl.specs import MODELS, ModelSpec

RULES = RuleSet()
RLT_RULES = RuleSet()
SECTION = "algorithm.off_policy"
WANTED = {
    "residual": "features, which are read in place of a value head",
    "dsrl": "denoised noise",
    "rlt": "states of a prompt",
}
"""Feature of the frozen policy that a small actor needs."""


@RULES.rule("algorithm.loss_type", "algorithm.off_policy.demos", "model")
def small_actor_can_learn(context: Context) -> Iterator[Finding]:
    """A small actor learns off-policy, on a policy worth freezing that offers what the actor reads and controls."""
    model = context.config.model
    family = context.family
    key = "model.small_actor.kind"
    kind = model.small_actor.kind
    assert kind is not None
    loss = context.config.algorithm.loss_type
    if not context.loss.off_policy or context.loss.imitates or (loss == "rlt") != (kind == "rlt"):
        message = f"loss_type '{loss}' does not train a small actor of the kind '{kind}' on a frozen policy"
        hint = f"choose algorithm={kind}; to act or evaluate leave it out: a saved policy records it"
        yield Finding(key, message, hint, "null", others=("algorithm.loss_type",))
    if model.model_path is None and model.warm_start is None:
        message = f"the frozen policy of '{kind}' would be random"
        hint = "give an output of `embodrl sft`, or a checkpoint as model.model_path"
        yield Finding("model.warm_start", message, hint, "a directory", others=(key,))
    able = [spec.name for spec in MODELS.all() if spec.value_head and _carries(spec, kind)]
    if family is not None and (family.only_acts or family.name not in able):
        wanted = WANTED[kind]
        message = f"'{kind}' needs {wanted}: {family.name} has none"
        yield Finding("model.model_type", message, "choose another model", ", ".join(able), others=(key,))


@RULES.rule("algorithm.off_policy", "model.small_actor.kind")
def noise_is_not_recorded(context: Context) -> Iterator[Finding]:
    """Demonstrations and interventions are actions, of which the noise that they came from is not known."""
    off_policy = context.config.algorithm.off_policy
    if context.config.model.small_actor.kind != "dsrl":
        return
    hint = "or choose algorithm=residual"
    others = ("model.small_actor.kind",)
    if off_policy.demos is not None:
        message = "demonstrations lack the noise behind their actions"
        yield Finding(f"{SECTION}.demos", message, f"set it to null, {hint}", "null", others=others)
    if off_policy.interventions:
        message = "interventions lack the noise behind their actions"
        yield Finding(f"{SECTION}.interventions", message, f"set it to false, {hint}", "false", others=others)


def _carries(spec: ModelSpec, kind: str) -> bool:
    if kind == "rlt":
        return spec.value_inputs is not None and not {"prefix", "prompt_mean"}.isdisjoint(spec.value_inputs)
    return kind != "dsrl" or spec.kind == "flow"


@RLT_RULES.rule("algorithm.loss_type", "algorithm.bc_coef", "algorithm.off_policy", "model")
def rl_token_is_there(context: Context) -> Iterator[Finding]:
    """RLT has its actor and an RL token, and no entropy or imitation terms of SAC."""
    config = context.config
    others = ("algorithm.loss_type",)
    if config.model.small_actor.kind != "rlt":
        message = "loss_type 'rlt' trains a small actor on an RL token"
        yield Finding("model.small_actor.kind", message, "choose algorithm=rlt", "rlt", others=others)
        return
    key = "model.warm_start" if config.model.model_path is None else "model.model_path"
    path = value_of(config, key)
    on_hub = config.model.model_path is not None and path_kind(str(path)) != "directory"  # checked if it is local
    if not on_hub and path not in (None, *context.made_before) and path_kind(f"{path}/rl_token.json") != "file":
        message = f"'{path}' has no RL token"
        hint = "train one: embodrl model token POLICY DATA --output DIR, and give DIR"
        yield Finding(key, message, hint, "a directory", others=others)
    for name, wanted in (("algorithm.bc_coef", 0), (f"{SECTION}.backup_entropy", False), (f"{SECTION}.alpha_lr", None)):
        if value_of(config, name) != wanted:
            shown = "null" if wanted is None else str(wanted).lower()
            message = "RLT's loss has no such term: algorithm.rlt holds the actor near its reference"
            yield Finding(name, message, f"set it to {shown}", shown, others=others)


@RLT_RULES.note("algorithm.off_policy", "model.small_actor", "algorithm.loss_type")
def rlt_keys_without_effect(context: Context) -> Iterator[Finding]:
    """SAC settings have no effect on RLT."""
    for key in (f"{SECTION}.alpha", "model.small_actor.scale"):
        if context.by_user(key):
            yield Finding(key, "has no effect: RLT does not read it", "leave it out")
