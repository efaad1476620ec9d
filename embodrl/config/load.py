"""Load a configuration: compose it, check types, run the rules, and report every problem at once."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

from embodrl.config.batches import fill_batches
from embodrl.config.check import allowed_values, prune, schema_of, validate, with_every_section
from embodrl.config.compose import Composition, compose, compose_resolved
from embodrl.config.hub_files import fetch_facts
from embodrl.config.nodes import DOTTED_NAMES, SPECIAL_KEY, Node, Origin, from_plain, lookup, origin_of, put, walk
from embodrl.config.presets import of_algorithm
from embodrl.config.processes import ProcessChoice, fill_processes
from embodrl.config.protocol import fill_protocol
from embodrl.config.rules import Report, run_rules
from embodrl.config.rules.base import Context, path_kind
from embodrl.config.rules.model import BUILTIN
from embodrl.config.schema import Config
from embodrl.config.schema.readers import Verb
from embodrl.config.training_share import ShareChoice, fill_training_share
from embodrl.config.trust import untrusted_code
from embodrl.config.yaml_text import to_yaml
from embodrl.deployment import Deployment, Solution, solve
from embodrl.errors import ConfigError, ConfigProblem, EmbodrlError
from embodrl.names import nearest
from embodrl.rule_set import Rule
from embodrl.specs import ADVANTAGES, ENVS, LOSSES, MODELS, PIPELINES
from embodrl.user_code import guard_user_code

WITHOUT_ENTRIES: set[str] = set()
"""Extensions whose import registered nothing, remembered because only the first import of a module shows it."""
REFERENCE = re.compile(r"\$\{([^${}]*)\}")


@dataclass
class LoadedConfig:
    """A valid configuration.

    Attributes:
        config: the typed values.
        origins: dotted key of every value -> its origin.
        choices: preset group -> preset, as far as the user chose.
        notes: settings that are allowed but have no effect or a surprising one.
        processes: the choice for ``env.num_processes: auto``; None where a number was given.
        share: the choice for ``cluster.training_share: auto``; None where a number was given.
        obstacles: reasons why a planned run could not start on this machine.
        check: runs the rules again, for another placement.
    """

    config: Config
    origins: dict[str, Origin]
    solution: Solution
    choices: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    processes: ProcessChoice | None = None
    share: ShareChoice | None = None
    obstacles: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    check: Callable[[Config, Solution], Report] | None = field(default=None, repr=False, compare=False)

    @property
    def deployment(self) -> Deployment:
        """Placement of all components of the run.

        Raises:
            EmbodrlError: a GPU is requested, and the machine lists none.
        """
        return self.solution.deployment

    def with_config(self, config: Config) -> Self:
        """Return a copy with other, valid values and the placement that follows from them."""
        return replace(self, config=config, solution=solve(config, self.solution.machine, self.solution.planning))

    def with_processes(self, number: int) -> Self:
        """Return a copy with the measured number of simulator processes in place of ``auto``."""
        assert self.processes is not None
        env = self.config.env.model_copy(update={"num_processes": number})
        share = None if self.share is None else self.share.with_processes(number)
        loaded = self.with_config(self.config.model_copy(update={"env": env}))
        if share is not None:
            loaded = loaded.with_training_share(share.training_share)
        return replace(loaded, share=share, processes=replace(self.processes, num_processes=number, measured=True))

    def with_training_share(self, share: float) -> Self:
        """Return a copy with another share of the work in training, and the placement that follows from it."""
        cluster = self.config.cluster.model_copy(update={"training_share": share})
        return self.with_config(self.config.model_copy(update={"cluster": cluster}))

    def with_absolute_paths(self) -> Self:
        """Return a copy with absolute paths to the files of the model and its teachers, valid from any directory."""
        model = self.config.model
        changes = {
            name: str(Path(text).expanduser().absolute())
            for name in ("model_path", "warm_start", "lora_path", "stats_path")
            if (text := getattr(model, name)) is not None and path_kind(text) and text != BUILTIN
        }
        algorithm = self.config.algorithm
        if algorithm.teacher is not None:
            teacher = str(Path(algorithm.teacher).expanduser().absolute())
            algorithm = algorithm.model_copy(update={"teacher": teacher})
        if algorithm.dagger.expert is not None:
            expert = str(Path(algorithm.dagger.expert).expanduser().absolute())
            dagger = algorithm.dagger.model_copy(update={"expert": expert})
            algorithm = algorithm.model_copy(update={"dagger": dagger})
        changed = {"model": model.model_copy(update=changes), "algorithm": algorithm}
        return replace(self, config=self.config.model_copy(update=changed))

    def to_yaml(self, with_origin: bool = False) -> str:
        """Return the whole configuration as YAML that ``load_resolved`` reads, optionally with origins as comments."""
        return to_yaml(self.config, self.origins if with_origin else None)


def load_config(
    overrides: list[str],
    config_file: Path | Mapping[str, object] | None = None,
    verb: Verb | None = None,
    further_rules: Sequence[Rule] = (),
    trust: bool = False,
    made_before: tuple[str, ...] = (),
) -> LoadedConfig:
    """Compose and validate a configuration.

    Args:
        overrides: command-line arguments such as ``env=maniskill`` (a preset) and ``runner.seed=3`` (a value).
        config_file: user's YAML file: values, and ``presets: {group: name}``; or the same as a mapping, in which
            ``{group: name}`` chooses a preset, too.
        verb: verb that the configuration is for: settings that the verb does not read are not checked, and are refused
            on the command line. ``plan`` accepts descriptions of absent machines. None checks everything.
        further_rules: rules of packages above this one, reported together with the rules here.
        trust: let the settings of a run that another user started run code.
        made_before: paths that need not exist yet, since earlier stages of a recipe create them.

    Raises:
        ConfigError: the configuration is invalid; lists every problem found.
    """
    composition = compose(overrides, config_file)
    # Before ``finish``, which imports modules that the settings name.
    refuse_untrusted_code(composition, trust)
    return finish(composition, verb, further_rules=further_rules, made_before=made_before)


def load_run(
    path: Path,
    overrides: list[str] | None = None,
    verb: Verb | None = None,
    resuming: bool = False,
    further_rules: Sequence[Rule] = (),
    trust: bool = False,
    text: str | None = None,
) -> LoadedConfig:
    """Load the whole configuration that a run wrote, e.g. ``RUN/config.yaml``; presets are not read.

    Args:
        path: configuration file.
        overrides: command-line arguments.
        verb: see ``load_config``.
        resuming: the weights come from a checkpoint, so a warm start need not exist any more.
        further_rules: see ``load_config``.
        trust: see ``load_config``.
        text: content used in place of the file's, e.g. from a checkpoint.

    Raises:
        ConfigError: the configuration is invalid; lists every problem found.
    """
    composition = compose_resolved(path, overrides or [], text)
    refuse_untrusted_code(composition, trust)
    if resuming:
        _keep_schedule(composition, compose_resolved(path, [], text).tree)
    _leave_graph_to_the_loss(composition)
    return finish(composition, verb, resuming, further_rules)


def _keep_schedule(composition: Composition, before: Node) -> None:
    """Keep the length of the learning-rate schedule when a run resumes with another number of iterations.

    Stretched over the new number, the learning rate would jump back up while Adam keeps the moments of the run's end.
    """
    key = "actor.optim.schedule_iterations"
    planned, now = (lookup(tree, "runner.max_iterations") for tree in (before, composition.tree))
    optim = lookup(composition.tree, "actor.optim")
    length = lookup(composition.tree, key)
    if planned is None or now is None or optim is None or planned.value == now.value:
        return
    # A null that the run wrote is not a request of the user.
    if length is None or (length.value is None and length.origin.kind == "run"):
        optim.children["schedule_iterations"] = from_plain(planned.value, planned.origin)
        message = f"stays at {planned.value}, as the run was started: after that the learning rate is constant"
        hint = f"to stretch the schedule, which raises the learning rate again, set {key}={now.value}"
        composition.notes.append(ConfigProblem(key, message, str(planned.origin), hint=hint, code="schedule-kept"))


def _leave_graph_to_the_loss(composition: Composition) -> None:
    """Drop an algorithm name that an older run stored as its graph; algorithms once named shared graphs."""
    node = lookup(composition.tree, "pipeline.name")
    if node is None or node.origin.kind != "run" or node.value in PIPELINES or of_algorithm(str(node.value)) is None:
        return
    message = f"'{node.value}' is the name of an algorithm; the loss determines the graph of an iteration"
    note = ConfigProblem("pipeline.name", message, str(node.origin), hint="leave it out", code="pipeline-renamed")
    composition.notes.append(note)
    node.value = None


def refuse_untrusted_code(composition: Composition, trust: bool) -> None:
    """Raise if only an untrusted file names code, before anything is imported."""
    if composition.untrusted and not trust:
        problems = untrusted_code(composition.tree, composition.untrusted)
        if problems:
            raise ConfigError(problems)


def load_resolved(path: Path, overrides: list[str] | None = None) -> Config:
    """Load a configuration like ``load_run``, without origins."""
    return load_run(path, overrides).config


def finish(
    composition: Composition,
    verb: Verb | None = None,
    resuming: bool = False,
    further_rules: Sequence[Rule] = (),
    made_before: tuple[str, ...] = (),
) -> LoadedConfig:
    """Check a composed tree; raise every problem at once."""
    tree = composition.tree
    not_imported, without_entries = import_extensions(tree)  # first: extensions add settings
    removed = remove_special(tree, schema_of(tree))
    not_fetched, commits = fetch_facts(tree, verb)
    fill_derived(tree)
    if verb in (None, "train", "plan"):
        fill_freeze_vision(tree)
    fill_precision(tree)
    fill_protocol(tree)
    removed += resolve_references(tree)
    problems = composition.problems + removed + not_imported + not_fetched
    schema = schema_of(tree)
    fill_batches(tree, schema)
    processes = fill_processes(tree, schema)
    share = fill_training_share(tree)
    config, invalid, wrong = validate(tree, schema, verb)
    problems += wrong
    # Rules that read one of these keys would check its default.
    invalid |= {problem.key for problem in removed}
    solution = solve(config, planning=verb == "plan")

    def check(config: Config, solution: Solution) -> Report:
        context = Context(config, tree, solution, resuming, verb, made_before, composition.choices)
        return run_rules(context, invalid, verb, further_rules)

    report = check(config, solution)
    problems += report.errors
    if not_imported:
        problems = without_consequences(problems, config)
    if problems:
        raise ConfigError(problems)
    keys = leaf_keys(config.model_dump())
    origins = {key: origin_of_value(tree, key) for key in keys}
    notes = composition.notes + without_entries + commits + report.notes
    return LoadedConfig(
        config, origins, solution, composition.choices, notes, processes, share, report.obstacles, check
    )


def origin_of_value(tree: Node, key: str) -> Origin:
    """Return the origin of a value: its own, else the origin of the list or scalar that holds it, else the schema."""
    node = lookup(tree, key)
    if node is not None:
        return node.origin
    parent = lookup(tree, key.rpartition(".")[0])
    if parent is not None and not isinstance(parent.value, dict):
        return origin_of(tree, key)
    return Origin("schema")


def leaf_keys(value: object, key: str = "") -> list[str]:
    """Return the dotted keys of all values; lists of mappings are entered, other lists are one value."""
    if isinstance(value, dict) and value:
        mapping = cast(dict[str, object], value)
        return [leaf for name, child in mapping.items() for leaf in leaf_keys(child, f"{key}.{name}" if key else name)]
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], dict):
        items = cast(list[object], value)
        return [leaf for index, item in enumerate(items) for leaf in leaf_keys(item, f"{key}.{index}")]
    return [key]


def fill_derived(tree: Node) -> None:
    """Add unset settings that follow from others."""
    env = lookup(tree, "env")
    env_type = lookup(tree, "env.env_type")
    name = env_type.value if env_type is not None else None
    spec = ENVS.entry(name) if isinstance(name, str) and name in ENVS else None
    if env is None or spec is None:
        return
    if spec.fill is not None:
        key, filled = spec.fill(tree.plain())
        origin = Origin("preset", f"follows from {key}")
        for name, value in filled.items():
            present = lookup(tree, name)
            if present is None or present.origin.kind in ("schema", "preset"):  # set neither by the user nor by a run
                put(tree, name, from_plain(value, origin))
    if spec.derive is None:
        return
    values = cast(dict[str, object], env.plain())
    derived, source = spec.derive(values)
    for name, value in derived.items():
        if name not in env.children:
            origin = Origin("preset", f"follows from env.{source}={values[source]}")
            env.children[name] = from_plain(value, origin)


def fill_freeze_vision(tree: Node) -> None:
    """Freeze the vision encoder of a warm start that learns from reward, unless ``model.freeze_vision`` is set.

    Families that cache vision features then compute them only once, while acting. Not for published models, whose
    features take much more memory than the images, nor for imitation, which trains the vision encoder.
    """

    def value(key: str) -> object:
        node = lookup(tree, key)
        return None if node is None else node.plain()

    family = value("model.model_type")
    loss = value("algorithm.loss_type")
    keeps = isinstance(family, str) and family in MODELS and MODELS.entry(family).keeps_vision_features
    by_reward = isinstance(loss, str) and loss in LOSSES and not LOSSES.entry(loss).learns_from_records
    is_small = value("model.model_path") is None and value("model.architecture") is None
    begins_trained = value("model.warm_start") is not None
    trains_all = value("model.trainable") in (None, "all") and value("model.use_film") is not True
    present = lookup(tree, "model.freeze_vision")
    is_free = present is None or present.origin.kind == "schema"
    if keeps and by_reward and is_small and begins_trained and trains_all and is_free:
        origin = Origin("preset", "follows from model.warm_start")
        put(tree, "model.freeze_vision", from_plain(True, origin))


def fill_precision(tree: Node) -> None:
    """Let rollouts use the training precision where ``rollout.precision`` is auto."""
    trained = lookup(tree, "actor.precision")
    acting = lookup(tree, "rollout.precision")
    if trained is None or trained.value == "auto" or (acting is not None and acting.value != "auto"):
        return
    put(tree, "rollout.precision", from_plain(trained.plain(), Origin("preset", "follows from actor.precision")))


def remove_special(tree: Node, schema: type[Config]) -> list[ConfigProblem]:
    """Remove keys such as ``_target_`` and values such as ``???``, and report them."""
    problems: list[ConfigProblem] = []
    for key, node in list(walk(tree)):
        for name, child in list(node.children.items()):
            full = f"{key}.{name}" if key else name
            # From a mapping on the command line; files are checked when read.
            if ("." in name and key not in DOTTED_NAMES) or not name:
                hint = "write sections as nested mappings: {runner: {seed: 3}}"
                problems.append(
                    ConfigProblem(
                        full, "is a dotted or empty key", str(child.origin), hint=hint, code="config-dotted-key"
                    )
                )
                del node.children[name]
            elif SPECIAL_KEY.fullmatch(name):
                hint = "remove it; models, environments and algorithms are chosen by their registered names"
                message = "names an object to build; embodrl never builds objects or calls functions from a config"
                problems.append(ConfigProblem(full, message, str(child.origin), hint=hint, code="config-special-key"))
                del node.children[name]
            elif child.value == "???":
                hint = f"give it, e.g. {full}=VALUE on the command line"
                message = "is missing: its value is '???'"
                problems.append(
                    ConfigProblem(
                        full,
                        message,
                        str(child.origin),
                        allowed_values(full, schema)[0],
                        hint=hint,
                        code="config-missing-value",
                    )
                )
                del node.children[name]
    return problems


def resolve_references(tree: Node) -> list[ConfigProblem]:
    """Replace ``${section.key}`` by the value of that key; resolvers such as ``${oc.env:HOME}`` are refused."""
    found = [(key, node) for key, node in walk(tree) if isinstance(node.value, str) and "${" in node.value]
    if not found:
        return []
    problems: list[ConfigProblem] = []
    # As JSON, so that defaults look like values from a file.
    defaults: dict[str, object] = json.loads(with_every_section(schema_of(tree))().model_dump_json())
    known = leaf_keys(defaults)
    for key, node in found:
        try:
            node.value = expand(tree, defaults, cast(str, node.value), (key,))
        except LookupError as error:
            wrong = str(error.args[0])
            hint = "refer to another key of the configuration as ${section.key}"
            hint += "; resolvers such as oc.env are not run" if ":" in wrong else ""
            message = f"the reference '${{{wrong}}}' {error.args[1]}"
            near = "" if wrong in known else nearest(wrong, known)
            problems.append(
                ConfigProblem(key, message, str(node.origin), nearest=near, hint=hint, code="config-reference")
            )
    for problem in problems:
        # Otherwise the schema would report the text of a reference again.
        prune(tree, problem.key)
    return problems


def expand(tree: Node, defaults: dict[str, Any], text: str, seen: tuple[str, ...]) -> Any:
    """Return the text with its references replaced; a lone reference keeps the type of its value.

    Raises:
        LookupError: ``(reference, reason)``.
    """

    def value_of(name: str) -> Any:
        if ":" in name:
            raise LookupError(name, "calls a resolver")
        if name in seen:
            raise LookupError(name, "is circular")
        node = lookup(tree, name)
        value: Any = defaults
        if node is not None:
            value = node.plain()
        else:
            for part in name.split("."):
                if not isinstance(value, dict) or part not in value:
                    raise LookupError(name, "names no key")
                value = cast(dict[str, Any], value)[part]
        if type(value) in (dict, list):
            raise LookupError(name, "names a section or list, not a single value")
        return expand(tree, defaults, value, (*seen, name)) if isinstance(value, str) and "${" in value else value

    whole = REFERENCE.fullmatch(text)
    if whole:
        return value_of(whole.group(1).strip())
    if "${" in REFERENCE.sub("", text):
        raise LookupError(text.partition("${")[2], "is not closed or nested")
    return REFERENCE.sub(lambda match: str(value_of(match.group(1).strip())), text)


def import_extensions(tree: Node) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """Import the modules in ``extensions``, so that the rules know what they register.

    Returns:
        Problems of modules that could not be imported, and notes on modules that register nothing.
    """
    section = lookup(tree, "extensions")
    problems: list[ConfigProblem] = []
    notes: list[ConfigProblem] = []
    for item in section.items if section is not None else []:
        if not isinstance(item.value, str):
            continue  # the schema reports invalid types
        problem = import_extension(item.value, str(item.origin))
        if problem is not None:
            problems.append(problem)
        elif item.value in WITHOUT_ENTRIES:
            message = f"'{item.value}' registers no environment, model, estimator, loss or pipeline"
            hint = "remove it, unless importing it has another intended effect"
            code = "extension-registers-nothing"
            notes.append(ConfigProblem("extensions", message, str(item.origin), hint=hint, code=code))
    return problems, notes


def without_consequences(problems: list[ConfigProblem], config: Config) -> list[ConfigProblem]:
    """Drop problems that follow from an extension that failed to import, e.g. names it would register."""
    left_out = {("env.env_type", "env-is-registered"), ("model.model_type", "model-is-registered")}
    sections = [
        section
        for section, is_known in (
            ("env", config.env.env_type in ENVS),
            ("model", config.model.model_type in MODELS),
        )
        if not is_known
    ]
    return [
        each
        for each in problems
        if (each.key, each.code) not in left_out
        and not (each.code == "config-unknown-key" and each.key.partition(".")[0] in sections)
    ]


def import_extension(name: str, origin: str) -> ConfigProblem | None:
    """Import a module; return the problem, or None."""
    import importlib
    import importlib.util

    def problem(message: str, hint: str, allowed: str = "") -> ConfigProblem:
        return ConfigProblem("extensions", message, origin, allowed, hint=hint, code="extension-import")

    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        hint = "write package.module; the module registers its parts"
        return problem(f"'{name}' is not a module name", hint, "package.module")
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        hint = "install its package, or put its directory on PYTHONPATH"
        return problem(f"no module '{name}'", hint, "package.module")
    if name.partition(".")[0] in sys.stdlib_module_names:
        message = f"'{name}' belongs to Python's standard library and registers nothing"
        return problem(message, "name the module that calls embodrl.register_env, register_model, ...")
    is_first = name not in sys.modules
    known = _registered()
    try:
        # A module may call sys.exit or os._exit, which would end the command without a message.
        with guard_user_code(f"importing '{name}'"):
            importlib.import_module(name)
    except EmbodrlError as error:  # from a registration: its own hint and code say what to change
        message = f"importing '{name}' failed: {error.message}"
        return ConfigProblem("extensions", message, origin, hint=error.hint, code=error.code)
    except Exception as error:  # noqa: BLE001  (a custom module may raise anything; it is reported)
        frames = traceback.extract_tb(error.__traceback__)
        # Frames of the import machinery say nothing about the user's code.
        places = [(frame.filename, frame.lineno) for frame in frames if not frame.filename.startswith("<frozen")]
        # A syntax error has no frame in the file that it is in.
        if isinstance(error, SyntaxError) and error.filename:
            places.append((error.filename, error.lineno))
        message = f"importing '{name}' failed: {type(error).__name__}: {error}"
        return problem(message, "see {}, line {}".format(*places[-1]))
    if is_first and _registered() == known:
        WITHOUT_ENTRIES.add(name)
    return None


def _registered() -> list[list[str]]:
    return [registry.names() for registry in (ENVS, MODELS, ADVANTAGES, LOSSES, PIPELINES)]
