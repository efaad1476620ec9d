"""Write docs/errors.md: every error code with its cause and cure, from the classes, the rules and the raise sites.

python scripts/make_error_reference.py           # write it
python scripts/make_error_reference.py --check   # exit code 1 if it is out of date
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from embodrl import errors
from embodrl.config.rules import shipped_rules
from embodrl.pipelines.select import PipelineCheck

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errors.md"
PACKAGE = ROOT / "embodrl"
ANY_OTHER = "depends on the case: follow the hint in the message"

INTRODUCTION = """\
# Error codes

<!-- Made by scripts/make_error_reference.py from the sources: change those instead. -->

Every error, problem of a configuration and note ends with a stable `code`, for searching and for scripts. Wording may
change, codes do not. In messages below, `…` stands for what depends on the case. A configuration with problems exits
with code 2, any other error with 1; `embodrl --help` lists all exit codes.
"""
CURES = {
    "embodrl": "follow the hint in the message",
    "config": "fix the problems listed in the report; each has a code of its own",
    "unknown-name": "use one of the names listed, or register yours through `extensions`",
    "usage": "see `--help` of the command",
    "missing-dependency": "install the package that the hint names; `embodrl doctor` lists what is missing",
    "pipeline": "fix the nodes that the message lists; `embodrl pipeline show` prints the graph",
    "batch": "check the shapes and columns named in the message",
    "batch-key": "add the column, or rename the one that clashes",
    "batch-shape": "make the shapes agree as the message says",
    "batch-index": "use an index below the number of rows",
    "checkpoint": "use another checkpoint, or the settings that it was made with",
    "hub": "follow the hint in the message",
    "statistics-missing": "choose a set with model.unnorm_key, or compute them: `embodrl sft sft.stats=data`",
    "policy-file": "restore the file from its origin; the message names the file and the key or tensor",
    "env": "read the message and the log of the simulator process in RUN/logs; `embodrl doctor ARGS` tries one frame",
    "env-protocol": "look for code of the simulator that writes to file descriptors or memory that are not its own",
    "env-order": "call what the hint names first",
    "env-worker-died": "look at RUN/logs; if memory ran out, use fewer environments (env.train.total_num_envs)",
    "env-timeout": "raise env.step_timeout_s, reset_timeout_s or start_timeout_s, or use fewer processes",
    "env-raised": "fix the environment: the message has its traceback",
    "env-quarantined": "fix the environment; if such values are expected, raise env.max_abs_reward or max_abs_state",
    "task-runner": "look at the exception that it carries; a closed runner takes no tasks",
    "task-queue-full": "wait for results, or raise max_queue",
    "task-id-taken": "use unique task ids",
    "file-format": "restore the file from its origin; the message names the file and the key",
    "file-damaged": "restore the named files from their origin, or write the directory again",
    "output": "free disk space, or choose a writable directory",
    "checkpoint-mismatch": "resume with the settings of the run that wrote the checkpoint",
    "cpu-unavailable": "choose cores that the process may use (see taskset -p), or let embodrl choose",
    "gymnasium-id": "correct env.id, or name the package that registers it",
    "prompt-too-long": "shorten the instruction, or raise max_prompt_tokens where the hint names it",
    "system-error": "the message has the operating system's reason: free disk space or memory, or choose another path",
    "worker": "look at RUN/logs; the message names the worker",
    "worker-died": "look at RUN/logs and at the kernel's log (out of memory?)",
    "worker-timeout": "look at RUN/logs for what the worker was doing",
    "worker-hung": "see the state and the stack in its message; if it was only slow, raise cluster.heartbeat_timeout_s",
    "worker-raised": "the message has the worker's traceback",
    "rollout-engine": "look at the error it carries; `embodrl resume RUN` continues from the last checkpoint",
    "non-finite": "resume from a checkpoint with a lower actor.optim.lr, or with actor.precision=fp32",
    "workflow": "look at the first error, which the message has, or at what the workflow rejects",
    "episode-timeout": "raise rollout.episode_timeout_s, or make the workflow faster",
    "reward": "fix the function: the message has its error; reward.on_error and reward.retries say what failures do",
    "message": "send plain types, arrays and tensors only",
    "wire": "follow the hint in the message; docs/serving.md says what messages hold",
    "store": "follow the hint in the message; docs/store.md says what a store holds",
    "remote-policy": "follow the hint in the message; the server's output has its side",
    "serving": "follow the hint in the message",
    "channel": "open the channel before use, and close it once",
    "channel-closed": "the sender has ended; look at its log",
    "channel-timeout": "the other side is slow or has stopped; look at its log",
    "weight-sync": "look at the log of the rollout process; the previous weights stay in use",
    "incomplete-sync": "the sender ended during a transfer; the next version repairs it",
    "weight-checksum": "check the disk or network; the next version repairs it",
    "weight-version": "restart the receiver, which then begins with a whole version",
    "weight-layout": "start both sides with the same model settings",
}
"""What to do about errors that carry the code of their class, and about those whose hint has no constant words."""


@dataclass
class Entry:
    """What the page says about a code.

    Attributes:
        code: of it.
        kind: ``class``, ``rule``, ``note``, ``problem`` or ``error``.
        source: class or rule that it is of.
        causes, cures: one or more of each.
    """

    code: str
    kind: str
    source: str
    causes: list[str] = field(default_factory=list)
    cures: list[str] = field(default_factory=list)


def class_entries() -> list[Entry]:
    """Return the codes of the error classes."""
    entries: list[Entry] = []
    for module in ("embodrl.errors",):
        for found in vars(importlib.import_module(module)).values():
            if inspect.isclass(found) and issubclass(found, errors.EmbodrlError):
                cause = (found.__doc__ or "").partition("\n")[0]
                entries.append(Entry(found.code, "class", found.__name__, [cause], [CURES.get(found.code, "")]))
    return entries


def rule_entries() -> list[Entry]:
    """Return the codes of the rules and notes; the cures are the hints of their findings."""
    entries: list[Entry] = []
    shipped = shipped_rules()
    for kind, rules in (("rule", [*shipped.rules, PipelineCheck().rule]), ("note", shipped.notes)):
        for rule in rules:
            cause = " ".join((inspect.getdoc(rule.check) or "").partition("\n\n")[0].split())
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(rule.check))))
            cures = [text for call in calls(tree, "Finding") if (text := argument(call, 2, "hint", tree))]
            entries.append(Entry(rule.code, kind, rule.check.__name__, [cause], cures or [ANY_OTHER]))
    return entries


def site_entries() -> list[Entry]:
    """Return the codes that are given where an error is raised or a problem is made."""
    entries: dict[tuple[str, str], Entry] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        scopes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for scope in scopes:
            for call in (node for node in ast.walk(scope) if isinstance(node, ast.Call)):
                found = site(call, scope)
                if found is None:
                    continue
                entry = entries.setdefault((found.code, found.kind), found)
                if entry is not found:
                    entry.causes += [text for text in found.causes if text not in entry.causes]
                    entry.cures += [text for text in found.cures if text not in entry.cures]
    return sorted(entries.values(), key=lambda entry: entry.code)


# Position of message, hint and code in the calls that make errors and problems.
POSITIONS = {"ConfigProblem": (1, 5, 6), "PipelineProblem": (1, 2, 3), "Finding": (1, 2, 7), "problem": (2, 3, 9)}


def site(call: ast.Call, scope: ast.AST) -> Entry | None:
    """Return what a call says about a code; None if it gives none."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    message_at, hint_at, code_at = POSITIONS.get(name, (0, 1, 99))
    code = next((word.value for word in call.keywords if word.arg == "code"), None)
    if code is None and len(call.args) > code_at:
        code = call.args[code_at]
    is_error = name in POSITIONS or name in vars(errors)
    if not (is_error and isinstance(code, ast.Constant) and isinstance(code.value, str)):
        return None
    kind = "problem" if name in POSITIONS else "error"
    source = {"problem": "ConfigProblem"}.get(name, name)
    message = argument(call, message_at, "message", scope)
    hint = argument(call, hint_at, "hint", scope)
    return Entry(code.value, kind, source, [message or ANY_OTHER], [hint] if hint else [])


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a function of that name."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]


def argument(call: ast.Call, position: int, name: str, scope: ast.AST) -> str:
    """Return the text of an argument, with … for what is not constant; "" if nothing is."""
    value = next((word.value for word in call.keywords if word.arg == name), None)
    if value is None and len(call.args) > position:
        value = call.args[position]
    return words(value, scope)


def words(value: ast.AST | None, scope: ast.AST, depth: int = 0) -> str:
    """Return an expression as text, with … for what is not constant."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in value.values]
        return "".join(map(str, parts))
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return words(value.left, scope, depth) + words(value.right, scope, depth)
    if isinstance(value, ast.IfExp):
        either = (words(value.body, scope, depth), words(value.orelse, scope, depth))
        return " / ".join(dict.fromkeys(text for text in either if text))
    if isinstance(value, ast.Name) and depth < 2:
        return _assigned(value.id, scope, depth, value.lineno)
    return "…" if value is not None else ""


def _assigned(name: str, scope: ast.AST, depth: int, before: int) -> str:
    """Return the text that a variable was given last before a line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign) or node.lineno > before:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            names = [getattr(part, "id", "") for part in target.elts]
            if name in names:
                found.append((node.lineno, words(value.elts[names.index(name)], scope, depth + 1)))
        elif getattr(target, "id", "") == name:
            found.append((node.lineno, words(value, scope, depth + 1)))
    return max(found, default=(0, "…"))[1]


@cache
def entries() -> list[Entry]:
    """Return all codes: classes, then rules, notes, and sites."""
    return [*class_entries(), *rule_entries(), *site_entries()]


def cell(text: str) -> str:
    """Return text that is safe in a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


def table(rows: list[Entry]) -> list[str]:
    """Return a table of codes."""
    lines = ["| code | cause | cure |", "|---|---|---|"]
    for row in sorted(rows, key=lambda entry: entry.code):
        cures = [text for text in dict.fromkeys(row.cures) if text and text.strip(" …/")]
        cures = cures or [CURES.get(row.code, ANY_OTHER)]
        causes = [text for text in dict.fromkeys(row.causes) if text.strip(" …/")] or [ANY_OTHER]
        lines.append(f"| `{row.code}` | {cell('; '.join(causes))} | {cell('; '.join(cures))} |")
    return [*lines, ""]


SECTIONS = (
    ("Errors by class", "An error without a code of its own has that of its class.", "class"),
    ("Errors", "Raised where an operation cannot continue.", "error"),
    ("Problems of a configuration, an argument or a pipeline", "Found when it is read.", "problem"),
    ("Rules between settings", "A configuration that breaks one is refused; all problems come in one report.", "rule"),
    ("Notes", "What is allowed but without effect or odd; printed, and nothing is stopped.", "note"),
)


def page() -> str:
    """Return the whole page."""
    found = entries()
    lines = [INTRODUCTION]
    for title, text, kind in SECTIONS:
        lines += [f"## {title}", "", text, "", *table([entry for entry in found if entry.kind == kind])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the page, or check it."""
    text = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE} is out of date; run: python scripts/make_error_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
