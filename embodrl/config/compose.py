"""Compose presets, a YAML file and command-line arguments into one tree of values with origins.

Hydra parses the arguments and determines the presets and their order; nothing is ever instantiated. Values are merged
here rather than by Hydra, because a value must keep its file and line and a misspelt key must stay an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from embodrl.config.argument_file import PREFIX, read_arguments
from embodrl.config.check import schema_keys, schema_of, unknown_key, with_every_section
from embodrl.config.nodes import (
    MAX_DEPTH,
    Node,
    Origin,
    from_mapping,
    from_plain,
    lookup,
    merge,
    parse_yaml,
    put,
    read_yaml,
)
from embodrl.config.other_systems import advice
from embodrl.config.presets import (
    DIRS,
    defaults_problems,
    directory_problems,
    groups,
    is_shipped,
    load,
    load_presets,
    of_algorithm,
    of_task,
    own_directories,
    parts_of,
    preset_file,
    presets,
)
from embodrl.config.schema.readers import Verb, reads
from embodrl.config.trust import code_settings, has_approval, is_of_run, is_trusted, untrusted_code
from embodrl.errors import ConfigProblem
from embodrl.names import is_misspelt, nearest

OPTIONAL = ("experiment", "pipeline", "serve")
"""Groups in which no preset may be chosen."""


@dataclass
class Argument:
    """One parsed command-line argument: ``key=value``, or ``~key`` to restore the schema default.

    Attributes:
        file: argument file that holds it; "" for the command line itself.
    """

    key: str
    value: object
    text: str
    delete: bool = False
    file: str = ""

    @property
    def origin(self) -> Origin:
        return Origin("file", self.file) if self.file else Origin("argument", self.text)


@dataclass
class Composition:
    """Composed user input: a tree of values, and the problems found before type checks.

    Attributes:
        untrusted: names of the files whose settings must not run code.
        own_presets: the user's preset directories.
    """

    tree: Node
    choices: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    notes: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    untrusted: tuple[str, ...] = ()
    own_presets: tuple[Path, ...] = ()


MAX_ARGUMENT = 10_000
"""Maximum characters of an argument: parsing takes more than linear time."""


PLACEMENT = "cluster.component_placement"
"""Mapping of components, or of several joined by commas, to places."""

AXES_KEY = "axes"
"""Key whose value is text with commas, which are not a sweep."""


def parse_arguments(texts: list[str]) -> tuple[list[Argument], list[ConfigProblem]]:
    """Parse Hydra-style arguments: ``key=value``, ``+key=value`` (the same) or ``~key``.

    Returns:
        The parsed arguments, and the problems of the others.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    arguments: list[Argument] = []
    problems: list[ConfigProblem] = []
    parser = OverridesParser.create()
    for text, before, after in zip(texts, ("", *texts), (*texts[1:], ""), strict=False):
        origin = f"command line: {text}"
        key = text.partition("=")[0] or "(argument)"
        if len(text) > MAX_ARGUMENT or key.count(".") > MAX_DEPTH:
            message = f"has more than {MAX_ARGUMENT} characters, or a key of more than {MAX_DEPTH} parts"
            hint = "put long lists and mappings into a YAML file and pass it with --config"
            problems.append(
                ConfigProblem(key[:80], message, str(Origin("argument", text)), hint=hint, code="argument-size")
            )
            continue
        if text.startswith("-"):
            hint = "options go before a lone '--' or are listed by --help; settings are written key=value"
            problems.append(
                ConfigProblem(text, "is not an option of this command", origin, hint=hint, code="argument-option")
            )
            continue
        if text.startswith("=") or text == "~" or ("=" not in text and not text.startswith("~")):
            problems += _form_problem(text, before, after)
            continue
        try:
            parsed = parser.parse_override(_home_quoted(text))
        # RecursionError: thousands of brackets exceed the parser's depth.
        except (HydraException, ValueError, RecursionError) as error:
            near = re.search(r"(?:at|input):? ('.*?')(?: expecting|$)", str(error).splitlines()[0])
            reason = f"can't be parsed{f' near {near[1]}' if near else ''}"
            hint = _syntax_hint(text) or (
                "write key=value without spaces, e.g. runner.seed=3 or env.tasks=[PushCube-v1,PullCube-v1]; quote text"
                " that holds spaces or any of , : ~ [ ] { } ( ) = as \"runner.name='my run'\""
            )
            problems.append(ConfigProblem(key, reason, origin, "key=value", hint=hint, code="argument-syntax"))
            continue
        if parsed.key_or_group == AXES_KEY:
            arguments.append(Argument(AXES_KEY, text.partition("=")[2] or None, text, parsed.is_delete()))
        elif parsed.is_sweep_override():
            hint = f"give one value; a list is written {key}=[...]; `embodrl sweep {text}` runs each value"
            problems.append(
                ConfigProblem(
                    key,
                    "is a sweep over several values; a run takes one",
                    origin,
                    hint=hint,
                    code="argument-sweep",
                )
            )
        elif parsed.package is not None:
            hint = f"write {parsed.key_or_group.split('/')[0]}=PRESET, and single keys as section.key=value"
            problems.append(
                ConfigProblem(
                    key, "puts a preset into another section with '@'", origin, hint=hint, code="argument-package"
                )
            )
        elif parsed.is_delete() and "=" in text:
            problems.append(
                ConfigProblem(key, "has both '~' and a value", origin, hint="write ~key alone", code="argument-delete")
            )
        else:
            value = None if parsed.is_delete() else parsed.value()
            arguments.append(Argument(parsed.key_or_group, value, text, parsed.is_delete()))
    return arguments, problems


def _home_quoted(text: str) -> str:
    """Return ``key=~/path`` with the path quoted: Hydra's grammar needs quotes, which a shell removes."""
    key, separator, value = text.partition("=")
    return f"{key}={value!r}" if separator and re.fullmatch(r"~[\w.-]*/[^,'\"\\]*", value) else text


def arguments_of_file(texts: list[str], file: str) -> tuple[list[Argument], list[ConfigProblem]]:
    """Parse the arguments of an argument file, as ``parse_arguments`` does."""
    arguments, problems = parse_arguments(texts)
    return [replace(argument, file=file) for argument in arguments], [replace(each, origin=file) for each in problems]


def values_of(arguments: list[Argument]) -> Node:
    """Return the tree of the values in arguments, ignoring presets."""
    tree = Node({}, Origin("argument"))
    apply_arguments(tree, [argument for argument in arguments if not is_choice(argument) and argument.key != DIRS])
    return tree


def code_of(arguments: list[Argument]) -> dict[str, object]:
    """Return the settings in arguments that would run code, by dotted key, including those in the user's presets."""
    directories = [argument.value for argument in arguments if argument.key == DIRS]
    return code_settings(values_of(arguments)) | ({DIRS: directories} if directories else {})


def foreign_code(arguments: list[Argument], file: str) -> list[ConfigProblem]:
    """Return a problem for each argument of an untrusted file that would run code."""
    presets = [_foreign_presets(file) for argument in arguments if argument.key == DIRS]
    return untrusted_code(values_of(arguments), (file,)) + presets


def _foreign_presets(file: str) -> ConfigProblem:
    message = "the run's file names preset directories, which may name code; embodrl never writes such directories"
    hint = "review the presets; then pass --presets DIR on the command line and remove dirs from the file"
    return ConfigProblem(DIRS, message, file, hint=hint, code="settings-run-code")


def _all_arguments(texts: list[str]) -> tuple[list[Argument], list[ConfigProblem], tuple[str, ...]]:
    """Parse arguments, including ``@FILE``; also return the names of files whose settings must not run code."""
    arguments: list[Argument] = []
    problems: list[ConfigProblem] = []
    untrusted: list[str] = []
    own: list[str] = []
    for text in texts:
        if not text.startswith(PREFIX):
            own.append(text)
            continue
        path = Path(text.removeprefix(PREFIX))
        found, content = read_arguments(path)
        parsed, wrong = arguments_of_file(found, str(path))
        arguments += parsed
        problems += wrong
        if not has_approval(code_of(parsed), content):
            untrusted.append(str(path))
            problems += [_foreign_presets(str(path)) for argument in parsed if argument.key == DIRS]
    parsed, wrong = parse_arguments(own)
    return [*arguments, *parsed], problems + wrong, tuple(untrusted)


def assignment(key: str, value: object) -> str:
    """Return ``key='value'`` as a command-line override with any characters in the value escaped."""
    text = str(value).replace("'", "\\'")
    return f"{key}='{text}'"


def _form_problem(text: str, before: str, after: str) -> list[ConfigProblem]:
    """Return the problem of an argument without a value, or nothing if it is the value of its predecessor."""
    if _is_key(before) and not _is_key(text):
        return []  # reported with its key
    separate = _is_key(text) and after and "=" not in after and not _is_key(after)
    hint = f"write {text}={after}" if separate else "write section.key=VALUE; pass a YAML file with --config FILE"
    if text.endswith((".yaml", ".yml")):
        hint = f"write --config {text}"
    elif "/" in text:
        hint = f"`embodrl resume {text}` continues a run; write settings as section.key=VALUE"
    key = text.partition("=")[0] or "(argument)"
    origin = f"command line: {text}"
    return [ConfigProblem(key, "is not in the form key=value", origin, "key=value", hint=hint, code="argument-form")]


def _is_key(text: str) -> bool:
    """Return whether an argument is a bare preset group or dotted key, whose value may be the next argument."""
    return text in groups() or re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", text) is not None


def _syntax_hint(text: str) -> str:
    key, _, value = text.partition("=")
    if "[" in key:
        dotted = re.sub(r"\[(\d+)\]", r".\1", key)
        return f"write {dotted}={value}"
    for opening, closing in ("[]", "{}", "()"):
        if value.count(opening) > value.count(closing):
            return f"close the bracket: '{text}{closing}'"
        if value.count(opening) < value.count(closing):
            return f"remove the '{closing}' that closes nothing, or quote the text"
    keys = re.compile(r"""["']?([a-z]+(?:, ?[a-z]+)+)["']?(?=\s*:)""")
    if value.startswith("{") and keys.search(value):
        escaped = keys.sub(lambda found: re.sub(", ?", r"\\,", found[1]), value)
        return f"a comma within a key needs a backslash: '{key}={escaped}'"
    inner = re.fullmatch(r"\[([^\[\]'\"]+=[^\[\]'\"]*)\]", value)
    if inner:  # a list of settings, e.g. recipe.rl
        return f"quote the settings in the list: '{key}=[{', '.join(_quoted(one) for one in inner[1].split(','))}]'"
    return ""


def _quoted(text: str) -> str:
    return f'"{text.strip()}"'


def check_choice(group: str, name: object, origin: str, own: Sequence[Path] = ()) -> ConfigProblem | None:
    """Return the problem of a preset choice, shipped or from the user's directories, or None."""
    known = groups()
    if group not in known:
        top = group.split("/")[0].split(".")[0]
        hint = "choose a preset with group=name; set a single key with section.key=value"
        return ConfigProblem(
            group,
            f"there is no preset group '{group}'",
            origin,
            ", ".join(known),
            nearest(top, known),
            hint,
            "preset-group-unknown",
        )
    names = presets(group, own)
    if name in names or (name is None and group in OPTIONAL):
        return None
    shown = "null" if name is None else str(name)
    message = f"there is no preset '{shown}' in the group '{group}'"
    near = nearest(shown, names)
    meant = is_misspelt(shown, near)
    hint = f"write {group}={near}; see `embodrl list presets`" if meant else "see `embodrl list presets`"
    near, hint = advice(group, shown) or (near, hint)
    if group == "env" and not meant:
        near, hint = of_task(shown) or (near, hint)
    if isinstance(name, str) and ("/" in name or "\\" in name or name.endswith((".yaml", ".yml"))):
        message = f"'{name}' is a path; presets are chosen by name"
        hint = "give the name of a preset; pass a YAML file with --config FILE, a directory with --presets DIR"
    if group == "pipeline":
        near, hint = of_algorithm(shown) or (near, hint)
    if group == "pipeline" and isinstance(name, str) and ":" in name:
        hint = f"give a custom function with pipeline.fn={name}"
    return ConfigProblem(group, message, origin, ", ".join(names), near, hint, "preset-unknown")


def check_own_preset(
    group: str, name: str, own: Sequence[Path], inside: tuple[tuple[str, str], ...] = ()
) -> list[ConfigProblem]:
    """Return the problems of a user's preset and of the presets in its ``defaults``."""
    path = preset_file(group, name, own)
    if is_shipped(path):
        return []
    tree, problems = load(path)
    wrong = defaults_problems(path, tree)
    if problems or wrong:
        return problems + wrong
    for part_group, part, origin in parts_of(tree, group):
        problem = check_choice(part_group, part, str(origin), own)
        if problem is None and (part_group, part) in (*inside, (group, name)):
            message = f"{part_group}={part} is made of itself"
            problem = ConfigProblem("defaults", message, str(origin), code="preset-defaults")
        if problem is not None:
            problems.append(problem)
        elif isinstance(part, str):
            problems += check_own_preset(part_group, part, own, (*inside, (group, name)))
    return problems


def apply_arguments(tree: Node, arguments: list[Argument]) -> list[ConfigProblem]:
    """Set the values given on the command line; the last one wins."""
    problems: list[ConfigProblem] = []
    for argument in arguments:
        if argument.key == "hydra" or argument.key.startswith(("hydra.", "hydra/")):
            hint = "remove it; embodrl uses Hydra only to choose presets, and `embodrl sweep` for its launchers"
            problems.append(
                ConfigProblem(
                    argument.key,
                    "Hydra's own settings can't be changed",
                    str(argument.origin),
                    hint=hint,
                    code="hydra-setting",
                )
            )
            continue
        if argument.delete and lookup(tree, argument.key) is None:
            schema = with_every_section(schema_of(tree))
            if argument.key not in (*schema_keys(schema), *groups()):
                problems.append(unknown_key(argument.key, str(argument.origin), schema))
            continue
        value = None if argument.delete else from_plain(argument.value, argument.origin)
        wrong = put(tree, argument.key, value)
        if not wrong and value is not None:
            place_alone(tree, argument.key)
        if wrong:
            hint = "write an item as KEY.0.NAME=VALUE, or give the whole list, here or in a --config file"
            problems.append(ConfigProblem(argument.key, wrong, str(argument.origin), hint=hint, code="argument-target"))
    return problems


def place_alone(tree: Node, key: str) -> None:
    """Remove a component that ``cluster.component_placement.NAME`` places from the lines that place several.

    ``actor,rollout,env: all`` with the argument ``cluster.component_placement.actor=0-3`` becomes ``rollout,env: all``
    and ``actor: 0-3``.
    """
    section, _, name = key.rpartition(".")
    if section != PLACEMENT:
        return
    lines = lookup(tree, section)
    assert lines is not None  # the argument has just been put there
    kept: dict[str, Node] = {}
    for names, place in lines.children.items():
        others = [part for part in names.split(",") if part.strip() != name]
        if names == name or len(others) == len(names.split(",")):
            kept[names] = place
        elif others:
            kept[",".join(others)] = place
    lines.value = kept
    lines.origin = kept[name].origin


def taken_back(arguments: list[Argument]) -> list[ConfigProblem]:
    """Return a note for each ``~key``: Hydra removes the key; here only the preset's or file's value goes."""
    return [
        ConfigProblem(
            argument.key,
            "'~' restores the schema default, not the value of a preset or file",
            str(argument.origin),
            hint=f"`embodrl config show` prints it; {argument.key}=VALUE sets another",
            code="argument-taken-back",
        )
        for argument in arguments
        if argument.delete
    ]


def repeated(arguments: list[Argument]) -> list[ConfigProblem]:
    """Return a note for each key that the command line sets more than once; the last value counts."""
    given: dict[str, list[Argument]] = {}
    for argument in arguments:
        if not (argument.file or argument.delete) and argument.key != DIRS:
            given.setdefault(argument.key, []).append(argument)
    return [
        ConfigProblem(
            key,
            f"is given {len(found)} times: {found[-1].text} counts, and {', '.join(one.text for one in others)} not",
            str(found[-1].origin),
            hint="leave one of them",
            code="argument-repeated",
        )
        for key, found in given.items()
        if (others := [one for one in found[:-1] if (one.value, one.delete) != (found[-1].value, found[-1].delete)])
    ]


def file_choices(tree: Node) -> tuple[dict[str, tuple[Any, str]], list[ConfigProblem]]:
    """Remove ``presets: {group: name}`` from a user's file and return its choices."""
    problems: list[ConfigProblem] = []
    defaults = tree.children.pop("defaults", None)
    if defaults is not None:
        hint = "write the choices as a mapping: 'presets: {env: NAME, model: NAME}'"
        problems.append(
            ConfigProblem(
                "defaults",
                "Hydra's defaults list is not supported in your own files",
                str(defaults.origin),
                hint=hint,
                code="config-defaults-list",
            )
        )
    section = tree.children.pop("presets", None)
    if section is None:
        return {}, problems
    if not isinstance(section.value, dict):
        hint = "write 'presets: {env: NAME, model: NAME}'"
        problems.append(
            ConfigProblem(
                "presets",
                "is not a mapping of groups to presets",
                str(section.origin),
                ", ".join(groups()),
                hint=hint,
                code="config-presets-mapping",
            )
        )
        return {}, problems
    return {group: (node.plain(), str(node.origin)) for group, node in section.children.items()}, problems


def _experiment_overridden(
    choices: dict[str, str | None], wanted: dict[str, tuple[object, str]], own_dirs: Sequence[Path]
) -> list[ConfigProblem]:
    """Return a note for each chosen preset that replaces one of the chosen experiment's own."""
    name = choices.get("experiment")
    if name is None:
        return []
    tree, _ = load(preset_file("experiment", name, own_dirs))
    own = {group: part for group, part, _ in parts_of(tree, "experiment") if group != "experiment"}
    return [
        ConfigProblem(
            group,
            f"{group}={choices[group]} overrides {group}={own[group]} of experiment '{name}'",
            wanted[group][1],
            hint=f"leave out experiment={name} unless its other settings are wanted",
            code="experiment-overridden",
        )
        for group in own
        if group in choices and choices[group] != own[group]
    ]


def is_choice(argument: Argument) -> bool:
    """Return whether an argument chooses a preset rather than sets a value."""
    value = not argument.delete and not isinstance(argument.value, dict)
    return "/" in argument.key or (value and argument.key in groups())


def concerning(overrides: list[str], verb: Verb) -> list[str]:
    """Return the arguments that a verb reads, presets, and unparsable arguments, which every verb reports."""
    kept: list[str] = []
    for text in overrides:
        arguments, _ = parse_arguments([text])
        if not arguments or is_choice(arguments[0]) or reads(verb, arguments[0].key):
            kept.append(text)
    return kept


def read_mapping(mapping: Mapping[str, Any]) -> tuple[Node, list[ConfigProblem]]:
    """Return a tree of a script's mapping; ``{env: toy}`` becomes ``{presets: {env: toy}}``."""
    tree, problems = from_mapping(mapping, Origin("file", "mapping"))
    # A mapping under a group name is the section itself.
    chosen = {name: node for name, node in tree.children.items() if name in groups() and isinstance(node.value, str)}
    for name, node in chosen.items():
        del tree.children[name]
        put(tree, f"presets.{name}", node)
    return tree, problems


def take_directories(wanted: dict[str, tuple[Any, str]], problems: list[ConfigProblem]) -> list[str]:
    """Remove the user's directories from a file's ``presets`` and return them."""
    given, origin = wanted.pop("dirs", ([], ""))
    paths = [given] if isinstance(given, str) else given
    if isinstance(paths, list) and all(isinstance(path, str) and path for path in cast(list[object], paths)):
        return cast(list[str], paths)
    problems.append(ConfigProblem(DIRS, "is not a list of directories", origin, "[DIR, ...]", code="preset-directory"))
    return []


def compose(overrides: list[str], config_file: Path | Mapping[str, Any] | None) -> Composition:
    """Compose presets, then the file or mapping, then the arguments, argument files (``@FILE``) first; later values
    win.

    Raises:
        ConfigError: an argument file can't be read.
    """
    arguments, problems, untrusted = _all_arguments(overrides)
    user = Node({}, Origin("file", "mapping"))
    base = Path()
    of_run = False
    if isinstance(config_file, Path):
        of_run = (config_file / "config.yaml").is_file()
        if of_run:
            config_file = config_file / "config.yaml"
        user, wrong = read_yaml(config_file, str(config_file))
        trusted = not user.children or is_trusted(config_file, user, of_run=of_run)
        untrusted += () if trusted else (str(config_file),)
        base = config_file.absolute().parent
        problems += wrong
    elif config_file is not None:
        user, wrong = read_mapping(config_file)
        problems += wrong
    wanted, wrong = file_choices(user)
    problems += wrong
    directories = take_directories(wanted, problems)
    if directories and isinstance(config_file, Path) and (of_run or is_of_run(config_file)):
        problems.append(_foreign_presets(str(config_file)))
        directories = []
    own = own_directories(directories, base)
    for argument in [a for a in arguments if a.key == DIRS]:
        dirs = {"dirs": (argument.value, str(argument.origin))}
        own = tuple(dict.fromkeys((*own, *own_directories(take_directories(dirs, problems)))))
    problems += directory_problems(own)
    # Missing presets have just been reported.
    own = tuple(path for path in own if path.is_dir())
    # The command line overrides the file.
    wanted |= {a.key: (a.value, str(a.origin)) for a in arguments if is_choice(a)}
    choices: dict[str, str | None] = {}
    for group, (name, origin) in wanted.items():
        problem = check_choice(group, name, origin, own)
        if problem is not None:
            problems.append(problem)
        elif not isinstance(name, str):
            choices[group] = None
        elif wrong := check_own_preset(group, name, own):
            problems += wrong
        else:
            choices[group] = name
    tree, wrong, foreign = load_presets(choices, own)
    problems += wrong
    merge(tree, user)
    problems += apply_arguments(tree, [a for a in arguments if not is_choice(a) and a.key != DIRS])
    chosen = {group: name for group, name in choices.items() if name}
    notes = taken_back(arguments) + repeated(arguments) + _experiment_overridden(choices, wanted, own)
    return Composition(tree, chosen, problems, notes, (*untrusted, *foreign), own)


def compose_resolved(path: Path, overrides: list[str], text: str | None = None) -> Composition:
    """Read a resolved configuration, e.g. ``RUN/config.yaml`` or ``text`` in its place, without presets."""
    tree, problems = read_yaml(path, str(path), "run") if text is None else parse_yaml(text, str(path), "run")
    untrusted = () if not tree.children or is_trusted(path, tree, text, of_run=True) else (str(path),)
    arguments, wrong = parse_arguments(overrides)
    problems += wrong
    for argument in arguments:
        if is_choice(argument):
            hint = "change single keys, or start a new run"
            problems.append(
                ConfigProblem(
                    argument.key,
                    "the presets of a run are fixed",
                    str(argument.origin),
                    hint=hint,
                    code="preset-of-a-run",
                )
            )
    problems += apply_arguments(tree, [a for a in arguments if not is_choice(a)])
    return Composition(tree, {}, problems, taken_back(arguments) + repeated(arguments), untrusted)
