"""Common parts of the verbs: arguments, loading the configuration, and exit codes."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from embodrl.cli.app import complete_settings
from embodrl.errors import ConfigError, ConfigProblem, EmbodrlError, without_controls
from embodrl.reporting.terminal import safe_streams
from embodrl.storage.atomic import FILE_SIZE_HINT

if TYPE_CHECKING:
    from embodrl.config import LoadedConfig
    from embodrl.config.schema import Config
    from embodrl.config.schema.readers import Verb

# Exceptions of the loader, numpy, torch and the interpreter when memory or threads are unavailable.
_OUT_OF_MEMORY = ("MemoryError", "annot allocate memory", "an't allocate memory", "failed to map", "start new thread")
EXIT_OK = 0
EXIT_ERROR = 1
EXIT_CONFIG = 2
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS",
        help="presets (env=maniskill) and values (runner.seed=3)",
        show_default=False,
        autocompletion=complete_settings,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML file with values and presets: {env: NAME}; or a run, whose configuration is used",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="write the results to this file, as JSON", show_default=False),
]
JsonOutput = Annotated[bool, typer.Option("--json", help="print one JSON object", show_default=False)]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="allow the settings of a run started by another user to run code (modules, functions, env.python)",
        show_default=False,
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error", show_default=False)]


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection: imported objects stay, and scanning them takes a seventh of the import time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load(
    overrides: list[str] | None, config_file: Path | None, verb: Verb | None = None, trust: bool = False
) -> LoadedConfig:
    """Load the configuration and print its notes to stderr; see ``load_config``.

    Raises:
        ConfigError: lists every problem found.
    """
    with importing():
        from embodrl.pipelines.load import load_config

        loaded = load_config(overrides or [], config_file, verb, trust)
    return _shown(loaded)


def _shown(loaded: LoadedConfig) -> LoadedConfig:
    show_notes(loaded.notes)
    choice = loaded.processes
    if choice is not None and not choice.measured:
        text = f"note: env.num_processes: auto has not been measured for these settings; using {choice.num_processes}"
        print(f"{text}\n      the first `embodrl train`, `eval` or `collect` measures it", file=sys.stderr)
    if loaded.share is not None and loaded.config.divides_devices:
        print(f"note: {loaded.share.line}", file=sys.stderr)
    return loaded


def load_measured(
    overrides: list[str] | None,
    config_file: Path | None,
    needed: Callable[[Config], bool] = lambda _: True,
    verb: Verb | None = None,
    trust: bool = False,
) -> LoadedConfig:
    """As ``load``, for verbs that start simulators: measures ``env.num_processes=auto`` unless already measured.

    ``needed`` returns whether simulators will be started; rules about settings that ``verb`` does not read are skipped.

    Raises:
        ConfigError: lists every problem found.
        EmbodrlError: the simulator can't run, or the measurement can't be saved.
    """
    with importing():
        from embodrl.pipelines.load import load_config

        loaded = load_config(overrides or [], config_file, verb, trust)
    if loaded.processes is not None and not loaded.processes.measured and needed(loaded.config):
        from embodrl.runs.measure import measure_processes

        number = measure_processes(loaded.config, loaded.processes, lambda line: print(line, flush=True))
        loaded = loaded.with_processes(number)
    return _shown(loaded)


def split_path(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """Split arguments into the leading path, if any, and the rest."""
    first, *rest = arguments or [""]
    if not first or "=" in first or first.startswith(("~", "+", "-")):
        return None, list(arguments or [])
    return Path(first), rest


def say_if_random(config: Config) -> None:
    """Warn, before anything else, that the policy is random if no weights are named."""
    from embodrl.config.policy_card import without_weights

    if words := without_weights(config.model):
        print(words)


def show_notes(notes: list[ConfigProblem]) -> None:
    """Print notes about a valid configuration to stderr."""
    for note in notes:
        print(f"note: {note.paragraph()}", file=sys.stderr)


def execute(action: Callable[[], int | None], debug: bool = False) -> NoReturn:
    """Run the body of a verb, report its errors on stderr, and exit.

    Args:
        action: returns the exit code; None for 0.
        debug: show tracebacks.

    Raises:
        typer.Exit: 0 ok, 2 configuration or usage, 1 any other error, 130 SIGINT, 143 SIGTERM.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    with safe_streams():
        code = _exit_code_of(action, debug)
    raise typer.Exit(code)


def _exit_code_of(action: Callable[[], int | None], debug: bool) -> int:
    try:
        return action() or EXIT_OK
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return EXIT_CONFIG
    except EmbodrlError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {without_controls(str(describe_memory_limit(error) or error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_SIGINT
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        described = describe_os_error(error) if isinstance(error, OSError) else describe_memory_limit(error)
        if described is None:
            raise
        if debug:
            traceback.print_exc()
        print(f"error: {without_controls(str(described))}", file=sys.stderr)
        return EXIT_ERROR


def describe_os_error(error: OSError) -> EmbodrlError:
    """Return the operating system's error as a message, and a hint."""
    hints = {
        errno.ENOSPC: "free disk space, or choose a directory on another disk",
        errno.EDQUOT: "your disk quota is used up: free space, or choose a directory on another disk",
        errno.EROFS: "the file system is read-only: choose a directory on another one",
        errno.EACCES: "permission denied: choose a writable directory",
        errno.EMFILE: "too many files are open: raise `ulimit -n`",
        errno.EFBIG: FILE_SIZE_HINT,
    }
    if error.errno in (errno.ENOMEM, errno.EAGAIN) and (limited := describe_memory_limit(error)) is not None:
        return limited
    hints[errno.ENOMEM] = "out of memory: close other programs, or use fewer environments"
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOENT and not _has_working_directory():
        where = f"{where}the working directory was removed: "
        hints[errno.ENOENT] = "start the command in an existing directory"
    hint = hints.get(error.errno or 0, "check the paths in the command; rerun with --debug for the traceback")
    return EmbodrlError(f"{where}{error.strerror or error or type(error).__name__}", hint, code="system-error")


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())  # noqa: PTH109 - which names what is missing
    except FileNotFoundError:
        return False


def describe_memory_limit(error: Exception) -> EmbodrlError | None:
    """Return the error for a failure caused by ``ulimit -v``; None without such a limit, or for other causes."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    text = f"{type(error).__name__}: {error}"
    if limit == resource.RLIM_INFINITY or not any(sign in text for sign in _OUT_OF_MEMORY):
        return None
    return EmbodrlError(
        f"out of memory: the shell limits virtual memory to {limit / 2**30:.2f} GiB ({text:.400})",
        "raise the limit: ulimit -v unlimited",
        code="memory-limit",
    )


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """Exit through ``finally`` clauses, which close simulator processes; a verb may install a better handler.

    During an import it kills the process and its children: libraries swallow exceptions there and stay half imported
    (NumPy does).
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(EXIT_SIGTERM)
        frame = frame.f_back
    raise SystemExit(EXIT_SIGTERM)
