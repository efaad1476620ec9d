"""The policy: names, checkpoints, dimensions, and the inputs that it accepts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from embodrl.config.other_systems import advice
from embodrl.config.policy_card import (
    ADAPTER_CONFIG,
    BUILTIN,
    card_differences,
    policy_directory,
    read_card,
    without_weights,
)
from embodrl.config.rules.base import Context, note, path_kind, rule
from embodrl.errors import EmbodrlError
from embodrl.fields import read_fields
from embodrl.hub import parse
from embodrl.names import is_misspelt, nearest
from embodrl.rule_set import Finding
from embodrl.specs import BUILT_IN_STATISTICS, MODELS, ModelSpec, families_of

CONFIG = "config.json"
OF_A_POLICY = {"embodrl", "architectures", "action_dim"}
"""Keys of a config.json that names no model type and may still belong to a policy, e.g. an openpi one."""


def _names(specs: Iterable[ModelSpec]) -> str:
    return ", ".join(spec.name for spec in specs)


@rule("model.model_type")
def model_is_registered(context: Context) -> Iterator[Finding]:
    """The model's name is registered."""
    name = context.config.model.model_type
    if name not in MODELS:
        near = nearest(name, MODELS.names())
        hint = (
            f"write model.model_type={near}"
            if is_misspelt(name, near)
            else "choose a known model, or name the module that registers yours"
        )
        near, hint = advice("model.model_type", name) or (near, hint)
        yield Finding("model.model_type", f"no model '{name}'", hint, ", ".join(MODELS), near)


@rule("model.model_path")
def checkpoint_exists(context: Context) -> Iterator[Finding]:
    """A local checkpoint is a directory; anything else has the form of a hub id."""
    path = context.config.model.model_path
    if path is None:
        return
    allowed = "an existing directory, a hub id as OWNER/NAME[@REVISION], or null"
    weights = ("model.safetensors", "model.safetensors.index.json")
    if path_kind(f"{path}/{ADAPTER_CONFIG}") == "file" and not any(path_kind(f"{path}/{name}") for name in weights):
        message = f"'{path}' holds adapters, not the weights that they modify"
        hint = f"set model.lora_path={path}, and model.model_path to the base model that {ADAPTER_CONFIG} names"
        yield Finding("model.model_path", message, hint, allowed)
    elif path_kind(f"{path}/config.json") == "file":
        return
    elif path_kind(path) == "directory":
        message = f"'{path}' has no config.json"
        hint = "give the directory that holds config.json and *.safetensors"
        family = context.family
        if family is not None and family.missing_config and path_kind(f"{path}/model.safetensors") == "file":
            hint = family.missing_config
        yield Finding("model.model_path", message, hint, allowed)
    elif path_kind(path) == "file":
        message = f"'{path}' is a file"
        hint = "give the directory that holds config.json and *.safetensors"
        yield Finding("model.model_path", message, hint, allowed)
    elif (name := parse(path)) is None or name.is_dataset:
        message = f"no directory '{path}'"
        hint = "give the directory of the checkpoint, or OWNER/NAME of the hub"
        yield Finding("model.model_path", message, hint, allowed)


@rule("model.model_type", "model.model_path", "model.warm_start", "algorithm.teacher")
def checkpoint_is_of_the_family(context: Context) -> Iterator[Finding]:
    """The config.json of the policy belongs to the chosen family, and its teacher's to one with the same actions."""
    model = context.config.model
    own = ("warm_start", model.warm_start) if model.model_path is None else ("model_path", model.model_path)
    yield from _of_the_family(context, f"model.{own[0]}", own[1])
    yield from _of_the_family(context, "algorithm.teacher", context.config.algorithm.teacher)


def _of_the_family(context: Context, key: str, path: str | None) -> Iterator[Finding]:
    family = context.family
    is_here = path not in (None, BUILTIN) and path_kind(f"{path}/{CONFIG}") == "file"
    if path is None or family is None or family.recognizes is None or not is_here:
        return
    file = Path(path).expanduser() / CONFIG
    others = ("model.model_type",)
    hint = "give a policy directory whose config.json names this family"
    try:
        raw = read_fields(file).content
    except EmbodrlError as error:
        yield Finding(key, error.message, hint, others=others)
        return
    found = families_of(raw)
    if not raw or family.recognizes(raw):  # an empty one says nothing; readers of its sizes refuse it
        return
    if key == "algorithm.teacher" and family.kind and any(MODELS.entry(name).kind == family.kind for name in found):
        return
    kind = next((text for name in ("model_type", "type") if isinstance(text := raw.get(name), str)), "")
    if found:
        are = " or ".join(found)
        message = f"{file} is of a {are} model, not {family.name}"
        yield Finding(key, message, f"set model.model_type={are}", nearest=found[0], others=others)
    elif kind or not raw.keys() & OF_A_POLICY:
        message = f"{file} is of " + (f"a '{kind}' model, not {family.name}" if kind else "no known model")
        yield Finding(key, message, hint, others=others)


@rule("model.lora_path", "model.model_path", "model.warm_start")
def adapters_exist(context: Context) -> Iterator[Finding]:
    """Adapters are a local directory in peft's layout, or a hub id, and have base weights."""
    model = context.config.model
    path = model.lora_path
    if path is None:
        return
    if model.model_path is None and model.warm_start is None:
        message = "adapters need base weights, but neither model.model_path nor model.warm_start names any"
        yield Finding(
            "model.lora_path", message, "set model.model_path to their base model", others=("model.model_path",)
        )
    found = path_kind(path)
    hub = parse(path)
    if path_kind(f"{path}/{ADAPTER_CONFIG}") != "file" and (found or not hub):
        wrong = f"'{path}' holds no {ADAPTER_CONFIG}" if found else f"no directory '{path}'"
        hint = f"give the directory that holds {ADAPTER_CONFIG} and adapter_model.safetensors"
        nested = f"{path}/lora_adapter"  # where OpenVLA-OFT's fine-tuning writes it
        if path_kind(f"{nested}/{ADAPTER_CONFIG}") == "file":
            hint = f"write model.lora_path={nested}"
        yield Finding(
            "model.lora_path", wrong, hint, "an existing directory, a hub id as OWNER/NAME[@REVISION], or null"
        )


@rule("model.warm_start", "model.model_path")
def warm_start_exists(context: Context) -> Iterator[Finding]:
    """A warm start is the shipped one or a directory."""
    model = context.config.model
    if model.warm_start in (None, BUILTIN, *context.made_before) or model.model_path is not None or context.resuming:
        return
    hint = "give a directory made by `embodrl sft`, builtin for the shipped weights, or null for random ones"
    for message, better in _no_policy("model.warm_start", model.warm_start):
        near = nearest(model.warm_start, [BUILTIN])
        yield Finding("model.warm_start", message, better or hint, "builtin, an existing directory, null", near)


@rule(
    *("algorithm.teacher", "algorithm.kl", "algorithm.adv_type", "algorithm.by_task"),
    "model.num_action_chunks",
)
def teacher_exists(context: Context) -> Iterator[Finding]:
    """A teacher is a directory with a policy; without advantages there is one to learn from."""
    algorithm = context.config.algorithm
    key = "algorithm.teacher"
    zero = next((name for name, spec in context.estimators.items() if spec.name == "zero"), "")
    if zero and (algorithm.teacher is None or not algorithm.kl.coef):
        at = key if algorithm.teacher is None else "algorithm.kl.coef"
        message = "adv_type 'zero' learns from a teacher alone, and there is none"
        hint = "name a policy: algorithm.teacher=DIR; its weight is algorithm.kl.coef"
        yield Finding(at, message, hint, "a directory", others=(zero,))
    if zero and algorithm.kl.placement == "reward":
        message = "adv_type 'zero' reads no rewards, so a KL that is subtracted from them teaches nothing"
        yield Finding("algorithm.kl.placement", message, "set it to loss", "loss", others=(zero,))
    if algorithm.teacher in (None, *context.made_before) or context.resuming:
        return
    for message, better in _no_policy(key, algorithm.teacher):
        hint = "give a directory made by `embodrl train`, `sft` or `export`"
        yield Finding(key, message, better or hint, "an existing directory, null")
    card = read_card(Path(algorithm.teacher).expanduser())
    chunk = None if card is None else card.get("num_action_chunks")
    if chunk not in (None, context.config.model.num_action_chunks):
        message = (
            f"was trained with chunks of {chunk} actions, and the policy has {context.config.model.num_action_chunks}"
        )
        hint = f"set model.num_action_chunks={chunk}, or choose another teacher"
        yield Finding(key, message, hint, others=("model.num_action_chunks",))


@rule("algorithm.dagger.expert", "algorithm.off_policy", "store.url")
def dagger_expert_exists(context: Context) -> Iterator[Finding]:
    """A policy that labels as the expert is a directory of a known family, and is asked."""
    key, path = "algorithm.dagger.expert", context.config.algorithm.dagger.expert
    off_policy = context.config.algorithm.off_policy
    if path is not None and context.config.store_url is not None:
        hint = "give it to the collectors: store.intervention=DIR"
        yield Finding(key, "has no effect: collectors correct what a store gets", hint, "null", others=("store.url",))
        return
    if path is not None and off_policy.interventions and off_policy.intervention_device is not None:
        device = "algorithm.off_policy.intervention_device"
        message = "has no effect: a person corrects at the device"
        yield Finding(key, message, "set one of them to null", "null", others=(device,))
        return
    # Not in any checkpoint, so a resumed run loads it again.
    if path in (None, *context.made_before) or (context.resuming and context.verb != "train"):
        return
    hint = "give a directory made by `embodrl train`, `sft` or `export`, or null for the scripted expert"
    for message, better in _no_policy(key, path):
        yield Finding(key, message, better or hint, "an existing directory, null")
        return
    file = Path(path).expanduser() / CONFIG
    try:
        known = families_of(read_fields(file).content)
    except EmbodrlError as error:
        yield Finding(key, error.message, hint)
        return
    if not known:
        yield Finding(key, f"{file} is of no known model", hint)


def _no_policy(key: str, directory: str) -> Iterator[tuple[str, str]]:
    """Yield a message if a directory holds no policy, with a hint if it is known where one is."""
    if path_kind(f"{directory}/{CONFIG}") == "file":
        return
    found = path_kind(directory) == "directory"
    hint = ""
    if path_kind(f"{directory}/policy/{CONFIG}") == "file":
        hint = f"write {key}={directory}/policy"
    elif found and (Path(directory).parent.name == "checkpoints" or path_kind(f"{directory}/config.yaml")):
        hint = f"write it to a directory first: embodrl export {directory} outputs/my-policy"
    yield f"'{directory}' holds no policy" if found else f"no directory '{directory}'", hint


@rule("model.random_weights", "model.model_path", "model.warm_start")
def policy_has_weights(context: Context) -> Iterator[Finding]:
    """Evaluated or served policies are trained, or random on purpose."""
    model = context.config.model
    if context.verb not in ("eval", "serve") or context.resuming or model.random_weights:
        return
    if message := without_weights(model):
        hint = (
            "name weights: model.model_path=DIR-or-hub-id or model.warm_start=DIR, or a run as the first argument;"
            " model.random_weights=true takes random ones"
        )
        yield Finding("model.model_path", message, hint, "a directory, or OWNER/NAME", others=("model.warm_start",))


@rule("model.unnorm_key", "model.model_path", "model.warm_start")
def statistics_have_weights(context: Context) -> Iterator[Finding]:
    """Robot statistics come with a checkpoint; random weights have none under that name."""
    model = context.config.model
    random = model.model_path is None and model.warm_start is None and model.stats_path is None
    if not random or model.unnorm_key in (None, *BUILT_IN_STATISTICS) or context.resuming:
        return
    reported = context.verb in ("eval", "serve") and not model.random_weights  # see policy_has_weights
    if not reported and context.verb in ("train", "eval", "record", "serve"):  # `sft` computes them
        message = f"the model has random weights and no statistics '{model.unnorm_key}'"
        hint = "set model.model_path to their checkpoint, or model.stats_path to a statistics file"
        yield Finding("model.model_path", message, hint, "a directory, or OWNER/NAME", others=("model.unnorm_key",))


@rule("model.model_type", "env.cameras")
def model_sees_the_cameras(context: Context) -> Iterator[Finding]:
    """The model takes a fixed number of images."""
    count = len(context.config.env.cameras)
    most = context.family.max_cameras if context.family is not None else None
    if most is not None and count > most:
        yield Finding(
            "env.cameras",
            f"{context.config.model.model_type} sees {most} camera{'s' * (most > 1)}, and {count} are configured",
            f"keep the {'one' if most == 1 else most} that shows the task best"
            + (f": sft.cameras=[{context.config.env.cameras[0].name}]" if context.verb == "sft" else ""),
            f"at most {most}",
            others=("model.model_type",),
        )


@rule("model.model_type", "algorithm.sampling.top_k")
def top_k_fits_the_bins(context: Context) -> Iterator[Finding]:
    """top_k is at most the number of bins."""
    top_k = context.config.algorithm.sampling.top_k
    bins = context.family.num_bins if context.family else None
    if bins is not None and top_k > bins:
        message = f"an action token has {bins} bins, fewer than {top_k}"
        hint = "set it to 0, which keeps all"
        yield Finding("algorithm.sampling.top_k", message, hint, f"0 to {bins}, but not 1")


@rule("model.model_type", "model.add_value_head")
def model_has_value_heads(context: Context) -> Iterator[Finding]:
    """Only some models have a value head."""
    if context.config.model.add_value_head and context.family and not context.family.value_head:
        message = f"{context.config.model.model_type} has no value head"
        yield Finding("model.add_value_head", message, "set it to false and choose a loss without a critic", "false")


def _gradients(context: Context, key: str) -> Iterator[Finding]:
    if context.family is not None and (where := context.family.only_acts):
        yield Finding(
            "model.model_type",
            f"a policy {where} has no gradients here: it can't be trained or fine-tuned",
            "use it with `embodrl eval`; `embodrl list models` shows the trainable families",
            "a family of embodrl",
            others=(key,),
        )


@rule("model.model_type", "algorithm.loss_type")
def trained_model_has_gradients(context: Context) -> Iterator[Finding]:
    """Training needs gradients, which a remote policy lacks."""
    yield from _gradients(context, "algorithm.loss_type")


@rule("model.model_type", "sft.max_steps")
def fine_tuned_model_has_gradients(context: Context) -> Iterator[Finding]:
    """Fine-tuning needs gradients, which a remote policy lacks."""
    yield from _gradients(context, "sft.max_steps")


@rule("model.value_head.hidden_sizes", "model.add_value_head")
def value_head_has_layers(context: Context) -> Iterator[Finding]:
    """The value head is an MLP with hidden layers."""
    model = context.config.model
    if model.add_value_head and not model.value_head.hidden_sizes:
        hint = "set it to [512,128]"
        yield Finding(
            "model.value_head.hidden_sizes",
            "the value head has no hidden layer",
            hint,
            "at least one integer above 0",
        )


@rule("model.model_type", "model.value_head.input")
def value_input_exists(context: Context) -> Iterator[Finding]:
    """The family supports the chosen input of the value head."""
    model = context.config.model
    offered = context.family.value_inputs if context.family is not None else None
    chosen = model.value_head.input
    if offered is not None and chosen != "auto" and chosen not in offered:
        able = _names(spec for spec in MODELS.all() if chosen in (spec.value_inputs or ()))
        message = f"{model.model_type} has no '{chosen}'; {able} have it"
        allowed = ", ".join(("auto", *offered))
        yield Finding("model.value_head.input", message, "set it to auto", allowed, others=("model.model_type",))


@rule("model.model_type", "model.trainable")
def part_can_train_alone(context: Context) -> Iterator[Finding]:
    """Only flow families have an action expert."""
    model = context.config.model
    offered = context.family.trainable if context.family is not None else None
    if offered is not None and model.trainable not in offered:
        able = _names(spec for spec in MODELS.all() if model.trainable in (spec.trainable or ()))
        message = f"{model.model_type} has no {model.trainable}; {able} have one"
        yield Finding(
            "model.trainable", message, "set it to all or lora", ", ".join(offered), others=("model.model_type",)
        )


@rule("model.model_type", "model.warm_start", "model.model_path")
def family_has_shipped_weights(context: Context) -> Iterator[Finding]:
    """Only some families have a warm start in the package."""
    model = context.config.model
    if model.warm_start != "builtin" or model.model_path is not None or context.resuming:
        return
    if context.family is not None and not context.family.builtin_warm_start:
        shipped = _names(spec for spec in MODELS.all() if spec.builtin_warm_start)
        yield Finding(
            "model.warm_start",
            f"embodrl ships no weights of {model.model_type}, only of {shipped}",
            "set it to null, or to a directory made by `embodrl sft`",
            "null, or a directory",
            others=("model.model_type",),
        )


@note("model.model_type", "env.include_state")
def state_is_seen(context: Context) -> Iterator[Finding]:
    """Not every model reads the robot's state."""
    if (
        context.by_user("env.include_state")
        and context.config.env.include_state
        and context.family is not None
        and context.family.uses_state is False
    ):
        message = f"has no effect: {context.config.model.model_type} sees only the camera and the instruction"
        yield Finding("env.include_state", message, "leave it out")


@note("model.model_type", "model.model_path", "env.include_state")
def checkpoint_sees_the_state(context: Context) -> Iterator[Finding]:
    """Public checkpoints of families that read the robot's state were trained with it."""
    config = context.config
    family = context.family
    reads = family is not None and family.uses_state is True
    if config.model.model_path is not None and reads and not config.env.include_state:
        message = f"{config.model.model_type} reads the robot's state, but env.include_state is false"
        yield Finding("model.model_path", message, "set env.include_state=true", others=("env.include_state",))


@note("model.model_type", "model.model_path", "model.warm_start", "model.num_action_chunks", "env")
def policy_was_trained_for_this(context: Context) -> Iterator[Finding]:
    """A policy rarely solves a task, or handles a camera, that it was not trained for."""
    if context.resuming or context.collecting:  # the weights come from a checkpoint, or an expert acts
        return
    directory = policy_directory(context.config.model)
    card = None if directory is None else read_card(directory)
    if card is None:
        return
    key = "model.warm_start" if context.config.model.model_path is None else "model.model_path"
    tasks = ", ".join(card.get("tasks", []))
    for at, difference in card_differences(card, context.config):
        if at.startswith("env.cameras"):
            yield Finding(key, difference, "use the training camera", others=(at,))
        elif at == "model.condition":
            yield Finding(at, difference, f"set model.condition={card['condition']}", others=(key,))
        else:
            hint = "train it on this task first (embodrl collect, then sft), or choose what it was trained on:"
            hint += f" {card.get('env_type')} tasks {tasks}"
            yield Finding(key, f"{difference}: expect a success rate near 0", hint, others=(at,))
