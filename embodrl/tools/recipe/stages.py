"""`embodrl run`: the stages of a recipe in sequence, each in its own command; resumes when run again.

All stages share one configuration, of which each verb reads its part. The recipe itself adds only the paths between
stages. ``DIR/recipe.json`` records each stage's settings and whether it has ended; resuming an interrupted stage is
left to its verb. Imports no torch: the stages need the memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from embodrl.config.check import schema_of, validate
from embodrl.config.compose import Composition, assignment, compose, concerning, is_choice, parse_arguments
from embodrl.config.isolated import interpreter_of
from embodrl.config.load import refuse_untrusted_code
from embodrl.config.nodes import Node, lookup, walk
from embodrl.config.schema import CollectConfig, RecipeConfig
from embodrl.config.schema.readers import Verb, reads
from embodrl.config.trust import untrusted_code
from embodrl.config.yaml_text import flow
from embodrl.errors import ConfigError, ConfigProblem, OutputError, UsageError
from embodrl.fields import read_fields
from embodrl.pipelines.load import load_config
from embodrl.preflight.simulators import preflight_videos
from embodrl.processes.child import module_command
from embodrl.processes.ending import stop_with_parent
from embodrl.specs import LOSSES
from embodrl.storage.integrity import check_checksums
from embodrl.storage.json_file import write_json_file
from embodrl.trainer.lock import RunLock

Name = Literal["collect", "teacher", "sft", "rl"]
VERBS: dict[Name, Verb] = {"collect": "collect", "teacher": "train", "sft": "sft", "rl": "train"}
"""Stages in order, with their commands."""
RECIPE_FILE = "recipe.json"
OUTPUT_DIR = "runner.output_dir"
DEMOS = "algorithm.off_policy.demos"
EXPERT = "algorithm.dagger.expert"
SEEDS_APART = 2_000_000
"""Distance between first demonstration seeds for consecutive runner.seed: keeps them and evaluations disjoint."""
NUM_SEEDS = 1000
_OF_ANY_RESULT = {"experiment", "presets.dirs", OUTPUT_DIR, "runner.seed", "runner.name"}
"""Settings under which the known results of a recipe hold."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Stage:
    """A stage of a recipe.

    Attributes:
        arguments: settings of its command.
        settings: settings it reads, except paths between stages: dotted key -> value on one line.
    """

    name: Name
    directory: Path
    arguments: tuple[str, ...]
    settings: Mapping[str, str]

    @property
    def outputs(self) -> Path:
        """Checksummed outputs that later stages read."""
        return self.directory if self.name == "collect" else self.directory / "policy"

    @property
    def is_begun(self) -> bool:
        staging = self.directory.with_name(f".{self.directory.name}.partial")
        return any(place.is_dir() and any(place.iterdir()) for place in (self.directory, staging))

    def command(self) -> list[str]:
        """Return the arguments of `embodrl` that start or resume the stage."""
        metrics = "sft_metrics.jsonl" if self.name == "sft" else "metrics.jsonl"
        if self.name == "collect":
            return ["collect", "--resumable", *self.arguments]
        saved = any(self.directory.glob("checkpoints/step_*"))
        # `embodrl resume` restarts a training without a checkpoint; fine-tuning must be started anew.
        if saved or (self.name != "sft" and (self.directory / metrics).is_file()):
            return ["resume", str(self.directory)]
        if self.name == "sft" and (self.directory / metrics).is_file():
            shutil.rmtree(self.directory)
        return [VERBS[self.name], *self.arguments]


@dataclass
class Recipe:
    """A validated recipe and its progress.

    Attributes:
        options: options of every command: --config, --trust.
        expected: line about the known result; "" if none.
        video_python: interpreter of the simulators that write videos, None for this one; "" without videos.
        begun: stage -> the settings it was started with, as kept in recipe.json.
        ended: stages that have ended with their results.
    """

    directory: Path
    stages: tuple[Stage, ...]
    options: tuple[str, ...]
    expected: str
    video_python: str | None = ""
    begun: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    ended: list[str] = field(default_factory=list[str])

    def write(self) -> None:
        """Save the progress; raises OutputError."""
        stages = {name: {"ended": name in self.ended, "settings": settings} for name, settings in self.begun.items()}
        write_json_file(self.directory / RECIPE_FILE, {"stages": stages})

    def read(self) -> None:
        """Load the progress; raises OutputError if recipe.json is damaged."""
        path = self.directory / RECIPE_FILE
        if not path.exists():
            return
        found = read_fields(path, OutputError, "choose another runner.output_dir").fields("stages")
        for name in found:
            stage = found.fields(name)
            settings = stage.fields("settings")
            self.begun[name] = {key: settings.text(key) for key in settings}
            self.ended += [name] * stage.flag("ended")

    def refuse_other(self) -> None:
        """Refuse a directory in which a stage was started with other settings, or by another program.

        Raises:
            ConfigError: names each setting.
            OutputError: there is a stage that recipe.json does not record.
        """
        changed: dict[tuple[str, str, str], list[Stage]] = {}
        for stage in self.stages:
            before = self.begun.get(stage.name)
            if not stage.is_begun:
                continue
            if before is None:
                hint = f"choose another {OUTPUT_DIR}"
                message = f"{stage.directory} has contents that this recipe did not create"
                raise OutputError(message, hint, code="recipe-directory")
            for key in sorted({*before, *stage.settings}):
                was = before.get(key, "unknown")
                now = stage.settings.get(key, "unknown")
                if was != now:
                    changed.setdefault((key, was, now), []).append(stage)
        if changed:
            raise ConfigError([_changed(*values, stages) for values, stages in changed.items()])

    def refuse_stale(self, stage: Stage) -> None:
        """Refuse to redo a stage whose output a later stage has used; the OutputError names both."""
        later = [each for each in self.stages[self.stages.index(stage) + 1 :] if each.is_begun]
        if later:
            raise OutputError(
                f"{stage.outputs} is missing, and {later[0].directory} was made from it",
                f"restore it, or remove {' and '.join(str(each.directory) for each in later)} to do these stages again",
                code="recipe-stale",
            )


def _changed(key: str, was: str, now: str, stages: list[Stage]) -> ConfigProblem:
    names = ", ".join(stage.name for stage in stages)
    last = stages[-1]
    hint = f"give {key}={was} as before, or another {OUTPUT_DIR}"
    if VERBS[last.name] == "train":
        hint += f"; `embodrl resume {last.directory} {key}={now}` changes only the training"
    return ConfigProblem(key, f"was {was} when {names} began, and is {now} now", hint=hint, code="recipe-changed")


def plan_recipe(overrides: list[str], config_file: Path | None = None, trust: bool = False) -> Recipe:
    """Check all stages of a recipe; starts nothing and writes nothing.

    Each override goes to the stages that read it. Checks that need the policy of an earlier stage are made when the
    stage starts.

    Raises:
        ConfigError: a stage has an invalid configuration: all problems of all stages.
        UsageError: the settings name no recipe, or no directory.
        OutputError: the directory has other contents.
    """
    composition = compose(overrides, config_file)
    refuse_untrusted_code(composition, trust)
    settings = _recipe_settings(composition)
    if composition.untrusted and not trust:
        _refuse_untrusted_code(settings)
    directory = _directory(composition.tree, composition.choices.get("experiment"))
    problems: dict[ConfigProblem, list[str]] = {
        problem: [] for problem in _unread_settings(overrides, composition.tree, settings)
    }
    stages: list[Stage] = []
    made: list[str] = []
    video_python: str | None = ""
    for name in settings.stages:
        own, users = getattr(settings, name), _arguments_for(overrides, VERBS[name])
        # The user's model and algorithm are those of the last stage, so a teacher keeps its own.
        given = [*users, *own] if name == "teacher" else [*own, *users]
        tree = compose(given, config_file).tree
        links, unchecked = _links(name, tree, directory, settings.stages)
        given += _seed_of_demonstrations(name, composition.tree, tree)
        try:
            config = load_config([*given, *links], config_file, VERBS[name], trust, tuple(made)).config
            if name == "rl" and config.env.video.enabled:
                video_python = interpreter_of(config)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
        arguments = (*given, *links, *unchecked)
        stages.append(Stage(name, directory / name, arguments, _read_settings(given, config_file, VERBS[name], links)))
        made.append(str(stages[-1].outputs))
    if problems:
        count = len(settings.stages)
        raise ConfigError([_with_stage_names(problem, names, count) for problem, names in problems.items()])
    options = [*(() if config_file is None else ("--config", str(config_file.absolute()))), *["--trust"] * trust]
    expected = _expectation(settings.expected, overrides, config_file)
    recipe = Recipe(directory, tuple(stages), tuple(options), expected, video_python)
    recipe.read()
    recipe.refuse_other()
    return recipe


def _expectation(known: str, overrides: list[str], config_file: Path | None) -> str:
    """Return a line about the expected result, which holds for the recipe without the user's settings."""
    if not known:
        return ""
    keys = {argument.key for argument in parse_arguments(overrides)[0] if not argument.key.startswith("runner.logger")}
    is_changed = config_file is not None or not keys <= _OF_ANY_RESULT
    return f"expected of the recipe without your settings: {known}" if is_changed else f"expected: {known}"


def _recipe_settings(composition: Composition) -> RecipeConfig:
    node = lookup(composition.tree, "recipe")
    try:
        settings = RecipeConfig.model_validate_json(json.dumps({} if node is None else node.plain()))
    except ValidationError:
        wrong = validate(composition.tree, schema_of(composition.tree))[2]
        raise ConfigError([*composition.problems, *wrong]) from None
    if not settings.stages and composition.problems:  # e.g. a misspelt experiment
        raise ConfigError(composition.problems)
    if not settings.stages:
        raise UsageError(
            "these settings are no recipe: recipe.stages is empty",
            "choose one: embodrl run experiment=NAME (see `embodrl list experiments`)",
            code="recipe-missing",
        )
    if list(settings.stages) != [name for name in VERBS if name in settings.stages]:
        message = f"is [{', '.join(settings.stages)}], not in the order of stages"
        hint = f"give some of them, in the order {', '.join(VERBS)}"
        raise ConfigError([ConfigProblem("recipe.stages", message, hint=hint, code="recipe-order")])
    return settings


def _refuse_untrusted_code(settings: RecipeConfig) -> None:
    """Refuse code named in an untrusted file's lists, which would become command-line arguments of the stages."""
    texts = [text for name in VERBS for text in getattr(settings, name)]
    tree = compose(texts, None).tree
    if problems := [problem for text in texts for problem in untrusted_code(tree, (text,))]:
        raise ConfigError(problems)


def _directory(tree: Node, experiment: str | None) -> Path:
    """Return the common directory as an absolute path; by default it is named after experiment and seed."""
    node = lookup(tree, OUTPUT_DIR)
    seed = lookup(tree, "runner.seed")
    chosen = "auto" if node is None else node.value
    if chosen != "auto":
        return Path(str(chosen)).expanduser().absolute()
    if experiment is None:
        hint = f"set {OUTPUT_DIR}=DIR: run again, the same command resumes there"
        raise UsageError(f"the recipe has no directory: {OUTPUT_DIR} is auto", hint, code="recipe-directory")
    return (Path("outputs") / f"{experiment}_seed{0 if seed is None else seed.value}").absolute()


def _arguments_for(overrides: list[str], verb: Verb) -> list[str]:
    """Return the arguments that a verb reads, without the directory, which the recipe sets."""
    return [text for text in concerning(overrides, verb) if text.lstrip("+~").partition("=")[0] != OUTPUT_DIR]


def _unread_settings(overrides: list[str], tree: Node, settings: RecipeConfig) -> Iterator[ConfigProblem]:
    for argument in parse_arguments(overrides)[0]:
        by_recipe = argument.key in (OUTPUT_DIR, "runner.seed") or argument.key.startswith("recipe.")
        if (
            not by_recipe
            and not is_choice(argument)
            and not any(reads(VERBS[name], argument.key) for name in settings.stages)
        ):
            message = f"no stage reads it: {', '.join(settings.stages)}"
            yield ConfigProblem(argument.key, message, str(argument.origin), hint="leave it out", code="recipe-unread")
    set_here = ["collect.output_dir", "sft.output_dir"] + ["sft.data_dir", DEMOS] * ("collect" in settings.stages)
    set_here += [EXPERT] * ("teacher" in settings.stages)
    for key in set_here:
        node = lookup(tree, key)
        if node is not None and node.origin.by_user:
            hint = f"leave it out: stages are in {OUTPUT_DIR}/STAGE"
            if key in ("sft.data_dir", DEMOS):
                hint += ", or leave out the stage: recipe.stages=[sft,rl]"
            yield ConfigProblem(key, "is set by the recipe", str(node.origin), hint=hint, code="recipe-path")


def _links(name: Name, tree: Node, directory: Path, stages: tuple[Name, ...]) -> tuple[list[str], list[str]]:
    """Return the settings for a stage's directory and for the outputs of earlier stages.

    The second list can only be checked after those have ended: the sizes of a checkpoint are read from its files.
    """
    demos = directory / "collect"
    links = list[str]()
    unchecked = list[str]()
    if name == "collect":
        return [assignment("collect.output_dir", demos)], []
    if name == "sft":
        links.append(assignment("sft.output_dir", directory / name))
        links += [assignment("sft.data_dir", demos)] * ("collect" in stages)
        return links, []
    links.append(assignment(OUTPUT_DIR, directory / name))
    path = lookup(tree, "model.model_path")
    if "collect" in stages and _reads_demonstrations(tree):
        links.append(assignment(DEMOS, demos))
    if name == "teacher":  # from random weights, or those that its settings name
        return links, unchecked
    if "teacher" in stages:
        links.append(assignment(EXPERT, directory / "teacher" / "policy"))
    if "sft" in stages and path is not None and path.value is not None:
        unchecked.append(assignment("model.model_path", directory / "sft" / "policy"))
    elif "sft" in stages:
        links.append(assignment("model.warm_start", directory / "sft" / "policy"))
    return links, unchecked


def _reads_demonstrations(tree: Node) -> bool:
    """Whether RL also, or only, learns from a dataset."""
    shares = [lookup(tree, key) for key in ("algorithm.off_policy.demo_fraction", "algorithm.bc_coef")]
    loss = lookup(tree, "algorithm.loss_type")
    offline = loss is not None and loss.value in LOSSES and LOSSES.entry(str(loss.value)).offline
    return offline or any(share is not None and share.value for share in shares)


def _seed_of_demonstrations(name: Name, whole: Node, tree: Node) -> list[str]:
    """Return the setting that gives every runner.seed its own demonstrations, unless the user sets it."""
    seed = lookup(whole, "runner.seed")
    first = lookup(tree, "collect.seed")
    if name != "collect" or seed is None or type(seed.value) is not int or (first is not None and first.origin.by_user):
        return []
    start = CollectConfig().seed if first is None else int(first.value)
    return [f"collect.seed={start + SEEDS_APART * (seed.value % NUM_SEEDS)}"]


def _read_settings(given: list[str], config_file: Path | None, verb: Verb, links: list[str]) -> dict[str, str]:
    """Return the settings that a verb reads, without paths set by the recipe."""
    set_here = {OUTPUT_DIR, *(link.partition("=")[0] for link in links)} - {"model.warm_start"}
    return {
        key: flow(node.plain())
        for key, node in walk(compose(given, config_file).tree)
        if not node.children and key and reads(verb, key) and key not in set_here
    }


def _with_stage_names(problem: ConfigProblem, names: list[str], total: int) -> ConfigProblem:
    if len(names) in (0, total):
        return problem
    return replace(problem, message=f"{problem.message} (in {', '.join(names)})")


def run_recipe(recipe: Recipe, tell: Callable[[str], None]) -> int:
    """Run the remaining stages; return the exit code of the stage that failed or was stopped, or 0.

    Signals are forwarded to the current stage, which saves and exits as its verb does. ``tell`` gets a line when a
    stage begins or is already done.

    Raises:
        MissingDependencyError: the last stage could not write its videos.
        OutputError: the directory can't be written, another process uses it, or a stage's results were removed.
    """
    if recipe.video_python != "":
        preflight_videos(recipe.video_python)
    try:
        recipe.directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(recipe.directory)
    except OSError as error:
        hint = f"set {OUTPUT_DIR} to a writable directory"
        raise OutputError(f"{recipe.directory} can't be written: {error}", hint) from error
    with contextlib.closing(lock):
        for number, stage in enumerate(recipe.stages, start=1):
            title = f"stage {number} of {len(recipe.stages)}, {stage.name}"
            if _has_ended(recipe, stage):
                tell(f"{title}: done already, {stage.outputs}")
                continue
            if stage.name in recipe.ended:
                recipe.refuse_stale(stage)
                recipe.ended.remove(stage.name)
            recipe.begun[stage.name] = dict(stage.settings)
            recipe.write()
            tell(f"{title}: {stage.directory}")
            code = _run_stage(recipe, stage)
            if code:
                tell(f"{title}: exit code {code}; the same command continues")
                return code
            if not _is_intact(stage):
                message = f"stage {stage.name} has ended without {stage.outputs}"
                raise OutputError(message, "see its output above", code="recipe-no-results")
            recipe.ended.append(stage.name)
            recipe.write()
    return 0


def _has_ended(recipe: Recipe, stage: Stage) -> bool:
    return stage.name in recipe.ended and _is_intact(stage)


def _is_intact(stage: Stage) -> bool:
    """Whether the results of a stage exist; raises EmbodrlError if they are damaged."""
    return stage.outputs.is_dir() and check_checksums(stage.outputs)


def _run_stage(recipe: Recipe, stage: Stage) -> int:
    """Run the command of a stage to its end; return its exit code, 128 + N if killed by signal N."""
    verb, *arguments = stage.command()
    options = [option for option in recipe.options if verb != "resume" or option == "--trust"]
    command = [*module_command("embodrl"), verb, *options, *arguments]
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=stop_with_parent)
    with _forwarding(process):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals of this process to another one, which is in its own session."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {
        number: signal.signal(number, forward)
        for number in _FORWARDED
        if signal.getsignal(number) != signal.SIG_IGN  # nohup: the stage must outlive its terminal
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
