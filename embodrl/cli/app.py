"""Look of all commands: -h, full descriptions, upper-case arguments, and completion of settings."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from embodrl.errors import UsageError
from embodrl.names import meant
from embodrl.specs import VERBS
from embodrl.user_code import ends_process

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Group(TyperGroup):
    """A command group; an unknown command is answered with its location or the nearest name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As click's; the error names where the command is, or the nearest one."""
        name = args[0] if args else ""
        known = self.list_commands(ctx)
        if name and not name.startswith("-") and name not in known:
            hint = "`embodrl --help` lists all commands"
            if name == "help":
                hint = f"write `{ctx.command_path} --help`, or `{ctx.command_path} COMMAND --help`"
            elif "=" in name and "train" in known:
                hint = f"write `{ctx.command_path} train {name}`"
            elif places := places_of(name, ctx.find_root()):
                hint = "write " + " or ".join(f"`{place}`" for place in places)
            elif near := meant(name, known):
                hint = f"did you mean `{ctx.command_path} {near}`?"
            elif near := meant(name, names_below(ctx.find_root())):
                places = places_of(near, ctx.find_root())
                hint = "did you mean " + " or ".join(f"`{place}`" for place in places) + "?"
            ctx.fail(f"there is no command '{name}'\n  hint: {hint}\n  code: command-unknown")
        return super().resolve_command(ctx, args)


def places_of(name: str, root: Any) -> list[str]:
    """Return where a name belongs: as a command, e.g. ``embodrl config validate``, or as a command's first argument.

    ``root`` is click's context of the whole command line.
    """
    verbs = root.command
    if not isinstance(verbs, Verbs):
        return []
    found: list[str] = []
    for first in verbs.list_commands(root):
        path = f"{root.command_path} {first}"
        command = verbs.loaded(root, first)
        if command is None:  # it can't be imported, which was reported on stderr
            continue
        found += [path] * (first == name) + [f"{path} {name}"] * (name in _subcommands(command, root, name))
    return found


def names_below(root: Any) -> list[str]:
    """Return the names that may follow commands."""
    verbs = root.command
    if not isinstance(verbs, Verbs):
        return []
    commands = [verbs.loaded(root, first) for first in verbs.list_commands(root)]
    return [name for command in commands if command is not None for name in _subcommands(command, root, "")]


def _subcommands(command: Any, root: Any, name: str) -> list[str]:
    """Return the subcommands of a command, or the matching choices of its first argument."""
    context = typer.Context(command, root, command.name)
    if isinstance(command, Group):
        return command.list_commands(context)
    argument = next((param for param in command.params if param.param_type_name == "argument"), None)
    if argument is None or argument.nargs != 1:
        return []
    return [item.value for item in argument.shell_complete(context, name) if item.type == "plain"]


class Verbs(Group):
    """The core's commands, and entry points, which are imported on demand.

    The entry point ``GROUP.NAME`` is the command NAME of a group.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        prefix = self._prefix(ctx)
        further = [name.removeprefix(prefix) for name in VERBS if name.startswith(prefix)]
        known = super().list_commands(ctx)
        return [*known, *(name for name in further if "." not in name and name not in known)]

    def _prefix(self, ctx: Any) -> str:
        return "" if ctx.parent is None else f"{self.name}."

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if it is unknown or can't be imported, which is reported on stderr.

        A verb is imported when it is called; until then its description, or the name of its package, stands in.
        """
        name = cmd_name
        verb = self._prefix(ctx) + name
        if name in self.commands or verb not in VERBS:
            return super().get_command(ctx, name)
        package = VERBS.package(verb)
        text = VERBS.entry(verb).description if package is None else f"Of the package {package}."
        return TyperCommand(name, short_help=text) if text else self._import(verb, name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As ``Group``'s; imports the command."""
        verb = self._prefix(ctx) + args[0] if args else ""
        if verb in VERBS and args[0] not in self.commands and self._import(verb, args[0]) is None:
            ctx.exit(1)
        return super().resolve_command(ctx, args)

    def loaded(self, ctx: Any, name: str) -> Any:
        """Return a command with its subcommands, importing it if it belongs to embodrl; else as ``get_command``."""
        verb = self._prefix(ctx) + name
        if name in self.commands or VERBS.package(verb) is not None:
            return self.get_command(ctx, name)
        return self._import(verb, name)

    def _import(self, verb: str, name: str) -> Any:
        try:
            self.commands[name] = _command_of(VERBS.get(verb), name)
        except BaseException as error:  # a third-party package may raise anything, or exit
            if ends_process(error):
                raise
            print(f"the verb '{verb}' can't be used: {type(error).__name__}: {error}", file=sys.stderr)
            return None
        return self.commands[name]


def _command_of(target: Any, name: str) -> Any:
    holder = make_app()
    if isinstance(target, typer.Typer):
        callback = target.registered_callback
        about = callback.callback if callback is not None else None
        holder.add_typer(target, name=name, short_help=None if about is None else summary(about))
    else:
        add(holder, target, name)
    return typer.main.get_group(holder).commands[name]


class Command(TyperCommand):
    """A command whose arguments appear as ``NAME`` in its help, without braces or Python types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click's; another tool's option that is a setting here is answered with its key."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # the class is private to typer
            from embodrl.config.other_systems import MEANT, key_advice

            option = getattr(error, "option_name", "")
            name = option.lstrip("-").replace("-", "_")
            key = MEANT.get(name)
            known = key_advice(name, lambda _: False)
            hint = known[1] if known is not None else f"write {key}=VALUE" if key is not None else ""
            if hint and type(error).__name__ == "NoSuchOption":
                ctx.fail(f"{option} is not an option of this command\n  hint: {hint}\n  code: argument-option")
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = [(param, param.get_help_record(ctx)) for param in self.get_params(ctx)]
        arguments = [
            (record[0].partition(" <")[0], record[1])
            for param, record in records
            if record is not None and param.param_type_name == "argument"
        ]
        options = [record for param, record in records if record is not None and param.param_type_name == "option"]
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def make_app(name: str | None = None, completion: bool = False, cls: type[Group] = Group) -> typer.Typer:
    """Return an application whose commands are added by ``add``."""
    return typer.Typer(
        name=name,
        cls=cls,
        no_args_is_help=True,
        add_completion=completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )


PresetDirectories = Annotated[
    list[Path] | None,
    typer.Option(
        "--presets",
        metavar="DIR",
        help="directory with your own presets, GROUP/NAME.yaml; may be repeated",
        show_default=False,
    ),
]


def with_presets(settings: list[str] | None, directories: list[Path] | None) -> list[str] | None:
    """Return the overrides of the command line, with --presets as a setting."""
    if not directories:
        return settings
    from embodrl.config.compose import assignment
    from embodrl.config.presets import DIRS

    return [*(settings or []), *(assignment(DIRS, path.expanduser().absolute()) for path in directories)]


def add(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Add a command; the list of commands shows the first line of its docstring.

    A command with --config gets --presets as well.
    """
    parameters = inspect.signature(function).parameters
    wanted = "config" in parameters and "presets" not in parameters
    shown = with_preset_directories(function) if wanted else function
    app.command(name, cls=Command, short_help=summary(function), context_settings=CONTEXT)(shown)


def with_preset_directories(function: Callable[..., None]) -> Callable[..., None]:
    """Return a verb with the option --presets, which becomes the setting ``presets.dirs``."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    settings = next(each.name for each in parameters if each.name in ("overrides", "settings"))

    @functools.wraps(function)
    def verb(presets: list[Path] | None = None, **values: Any) -> None:
        values[settings] = with_presets(values[settings], presets)
        function(**values)

    option = inspect.Parameter("presets", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PresetDirectories)
    place = 1 + next(index for index, each in enumerate(parameters) if each.name == "config")
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    parameters.insert(place, option)
    vars(verb)["__signature__"] = inspect.Signature(parameters)
    verb.__annotations__ = {each.name: each.annotation for each in parameters}
    return verb


def summary(function: Callable[..., None]) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def choose(value: str, options: Iterable[str], what: str) -> str:
    """Return the value if it is one of the options.

    Raises:
        UsageError: the value is not an option; names the nearest one.
    """
    known = list(options)
    if value in known:
        return value
    near = meant(value.lower(), known)
    raise UsageError(
        f"unknown {what} '{value}'; available: {', '.join(known)}",
        f"did you mean '{near}'?" if near else f"choose one of {', '.join(known)}",
        code="argument-choice",
    )


def one_of(options: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion of fixed words."""
    known = list(options)
    return lambda incomplete: [word for word in known if word.startswith(incomplete)]


def complete_settings(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete presets (``env=man``) and keys (``actor.optim.l``), with descriptions.

    Bash splits words at ``=``: only the part after it is completed, and the preceding arguments end with ``KEY =``.
    """
    args: list[str] = ctx.params.get("overrides") or []
    if args and args[-1] == "=":
        return [(value, text) for value, text in _values(args[-2]) if value.startswith(incomplete)]
    if args and "=" not in args[-1] and not incomplete:  # click turns the "=" after a key into ""
        return _values(args[-1])
    key, equals, prefix = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", text) for value, text in _values(key) if value.startswith(prefix)]
    return [(name, text) for name, text in _keys() if name.startswith(incomplete)]


def _values(key: str) -> list[tuple[str, str]]:
    from embodrl.config.check import allowed_values, shipped_schemas
    from embodrl.config.presets import describe, groups, own_directories, presets

    if key in groups():
        own = own_directories()
        return [(name, describe(key, name, own)) for name in presets(key, own)]
    allowed, options = next((found for one in shipped_schemas() if any(found := allowed_values(key, one))), ("", []))
    return [(option, "") for option in options or (["true", "false"] if allowed == "true or false" else [])]


def _keys() -> list[tuple[str, str]]:
    from embodrl.config.check import model_of, schema_keys, section_model, shipped_schemas
    from embodrl.config.presets import groups

    keys: dict[str, str] = {}
    for schema in shipped_schemas():
        for key in schema_keys(schema):
            section, _, name = key.rpartition(".")
            model = section_model(section, schema)
            info = model.model_fields.get(name) if model is not None else None
            if info is not None and model_of(info.annotation) is None:
                keys[f"{key}="] = info.description or ""
    return [*((f"{group}=", "preset") for group in groups()), *keys.items()]
