"""Entries of error codes: class, rule, or raise sites, read from the sources."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from embodrl import errors
from embodrl.config.rules import Rule, shipped_rules
from embodrl.pipelines.select import PipelineCheck

PACKAGE = Path(errors.__file__).parent
ANY_OTHER = "depends on the case: follow the hint in the message"
KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LITERAL = re.compile(rf'(?:"|code: )(?P<code>{KEBAB.pattern})(?="|\\n|$)', re.MULTILINE)
"""A part of the sources that may be a code."""
PRINTED = re.compile(
    rf"(?P<error>error: )?(?P<message>[^\n]+)\n +hint: (?P<hint>[^\n]*)\n +code: (?P<code>{KEBAB.pattern})\s*"
)
"""The text of an error that is printed rather than raised."""

CURES = {
    "embodrl": "follow the hint in the message",
    "config": "fix the problems listed in the report; each has its own code",
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
    "env-protocol": "look for simulator code that writes to foreign file descriptors or memory",
    "env-order": "first make the call that the hint names",
    "env-worker-died": "look at RUN/logs; if memory ran out, use fewer environments (env.train.total_num_envs)",
    "env-timeout": "raise env.step_timeout_s, reset_timeout_s or start_timeout_s, or use fewer processes",
    "env-raised": "fix the environment: the message has its traceback",
    "env-quarantined": "fix the environment; if such values are expected, raise env.max_abs_reward or max_abs_state",
    "task-runner": "look at the exception that it carries; a closed runner takes no tasks",
    "task-queue-full": "wait for results, or raise max_queue_size",
    "task-id-taken": "use unique task ids",
    "file-format": "restore the file from its origin; the message names the file and the key",
    "file-damaged": "restore the named files from their origin, or write the directory again",
    "output": "free disk space, or choose a writable directory",
    "checkpoint-mismatch": "resume with the settings of the run that wrote the checkpoint",
    "cpu-unavailable": "choose cores that the process may use (see taskset -p), or let embodrl choose",
    "bench-env-failed": "see the last words of the simulator in the message",
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
    "wire": "follow the hint in the message; docs/serving.md describes the contents of messages",
    "store": "follow the hint in the message; docs/store.md describes the contents of a store",
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
"""Cures for errors with the code of their class, and for errors whose hint has no constant words."""


VALUES = {
    "config-choice": (
        "a value is not allowed",
        "choose one of the allowed values listed in the report",
    ),
    "config-length": ("a list has too few or too many items", "give as many items as the report says"),
    "config-range": (
        "a number is too small, too large or not finite",
        "give a number within the range that the report names",
    ),
    "config-type": (
        "a value is of another type: text for a number, a number for a list, ...",
        "write it as the report says",
    ),
    "config-value": ("a value is refused for a reason that the message gives", "give a value that the report allows"),
}
"""Cause and cure of codes whose messages consist of variable parts only."""


@dataclass
class CodeEntry:
    """Facts about a code.

    Attributes:
        kind: ``class``, ``rule``, ``note``, ``problem`` or ``error``.
        source: class or rule that defines it.
        cases: ``(cause, cure)`` of each finding or raise site, with … for variable parts; the cure is "" if there is
            none.
    """

    code: str
    kind: str
    source: str
    cases: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    @property
    def causes(self) -> list[str]:
        """Every distinct cause; causes without constant words only if there is no other."""
        return [text for text in dict.fromkeys(cause for cause, _ in self.cases) if _has_words(text)] or [ANY_OTHER]

    @property
    def cures(self) -> list[str]:
        """Every distinct cure, or the one of ``CURES`` if the sources have none."""
        found = [text for text in dict.fromkeys(cure for _, cure in self.cases) if _has_words(text)]
        return found or [CURES.get(self.code, ANY_OTHER)]


def entries() -> list[CodeEntry]:
    """Return all codes: classes, then rules, notes, and raise sites."""
    return [*class_entries(), *rule_entries(), *site_entries()]


def entries_of(code: str) -> list[CodeEntry]:
    """Return the entries of one code, reading only the sources that contain it; empty if unknown."""
    return [entry for entry in (*class_entries(), *rule_entries(code), *site_entries(code)) if entry.code == code]


def nearest_code(name: str) -> str:
    """Return the code nearest to a name, or "" if none is near."""
    known = {entry.code for entry in class_entries()} | {rule.code for _, rule in _rules()}
    texts = [path.read_text(encoding="utf-8") for path in _sources()]
    literals = {found["code"] for text in texts for found in LITERAL.finditer(text)}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), sorted(known | literals), n=8, cutoff=0.7)
    # Few strings in the sources are codes, so only near ones are looked up.
    return next((code for code in near if code in known or site_entries(code)), "")


def class_entries() -> list[CodeEntry]:
    """Return the codes of the error classes."""
    classes = [found for found in vars(errors).values() if inspect.isclass(found)]
    return [
        CodeEntry(
            found.code, "class", found.__name__, [((found.__doc__ or "").partition("\n")[0], CURES.get(found.code, ""))]
        )
        for found in classes
        if issubclass(found, errors.EmbodrlError)
    ]


def _rules() -> list[tuple[str, Rule]]:
    shipped = shipped_rules()
    rules = [*shipped.rules, PipelineCheck().rule]
    return [*(("rule", rule) for rule in rules), *(("note", note) for note in shipped.notes)]


def rule_entries(code: str | None = None) -> list[CodeEntry]:
    """Return the codes of the rules and notes, or one of them; the cures are the hints of their findings."""
    found: list[CodeEntry] = []
    for kind, rule in _rules():
        if code not in (None, rule.code):
            continue
        cause = " ".join((inspect.getdoc(rule.check) or "").partition("\n\n")[0].split())
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(rule.check))))
        cures = [text for call in calls(tree, "Finding") if (text := argument(call, 2, "hint", tree))]
        found.append(CodeEntry(rule.code, kind, rule.check.__name__, [(cause, cure) for cure in cures or [ANY_OTHER]]))
    return found


def site_entries(code: str | None = None) -> list[CodeEntry]:
    """Return the codes, or one of them, given where an error is raised, made or printed."""
    found: dict[tuple[str, str], CodeEntry] = {}
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        if code is not None and f'"{code}"' not in text and f"code: {code}" not in text:
            continue
        for entry in _entries_in(ast.parse(text)):
            if code in (None, entry.code):
                known = found.setdefault((entry.code, entry.kind), entry)
                known.cases += [case for case in entry.cases if case not in known.cases]
    return sorted(found.values(), key=lambda entry: entry.code)


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _entries_in(tree: ast.Module) -> Iterator[CodeEntry]:
    """Yield a module's entries about codes, one per place."""
    for node, scope in _with_functions(tree):
        if isinstance(node, ast.Call):
            yield from site(node, scope, tree)
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            yield from printed(words(node, scope))
        elif isinstance(node, ast.Dict):
            yield from answered(node, scope)


def _with_functions(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield every node with its outermost enclosing function, or the module."""
    scopes: list[ast.AST] = [tree]
    while scopes:
        for child in ast.iter_child_nodes(scopes.pop()):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from ((node, child) for node in ast.walk(child))
            else:
                yield child, tree
                scopes.append(child)


def _has_words(text: str) -> bool:
    return bool(text.strip(" …/"))


# Position of message, hint and code in the calls that make errors and problems.
POSITIONS = {"ConfigProblem": (1, 5, 6), "PipelineProblem": (1, 2, 3), "Finding": (1, 2, 7), "problem": (2, 3, 9)}


def site(call: ast.Call, scope: ast.AST, module: ast.Module) -> list[CodeEntry]:
    """Return a call's entry about its codes: one, or the ones it chooses from; empty if it has none."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    message_at, hint_at, code_at = POSITIONS.get(name, (0, 1, 99))
    code = next((word.value for word in call.keywords if word.arg == "code"), None)
    if code is None and len(call.args) > code_at:
        code = call.args[code_at]
    if code is None or not (name in POSITIONS or name in vars(errors)):
        return []
    kind = "problem" if name in POSITIONS else "error"
    source = {"problem": "ConfigProblem"}.get(name, name)
    case = (argument(call, message_at, "message", scope), argument(call, hint_at, "hint", scope))
    return [CodeEntry(text, kind, source, [VALUES.get(text, case)]) for text in _codes(code, module)]


def _codes(value: ast.AST, module: ast.Module) -> list[str]:
    """Return the possible codes of an expression, as far as they are constants of its module."""
    values = [value]
    if isinstance(value, ast.Name):
        assignments = [node for node in ast.walk(module) if isinstance(node, ast.Assign)]
        values = [node.value for node in assignments if getattr(node.targets[0], "id", "") == value.id]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        named = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == value.func.id]
        inside = [node for function in named for node in ast.walk(function)]
        values = [node.value for node in inside if isinstance(node, ast.Return) and node.value is not None]
    either = [part for one in values for part in ((one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,))]
    texts = [part.value for part in either if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [text for text in dict.fromkeys(texts) if KEBAB.fullmatch(text)]


def printed(text: str) -> list[CodeEntry]:
    """Return the entry of a code in a text printed like an error, without a raise."""
    found = PRINTED.fullmatch(text)
    if found is None:
        return []
    return [CodeEntry(found["code"], "error" if found["error"] else "problem", "", [(found["message"], found["hint"])])]


def answered(node: ast.Dict, scope: ast.AST) -> list[CodeEntry]:
    """Return the entry of the code in a server's response, ``{"error": MESSAGE, "code": CODE}``."""
    parts = {
        key.value: value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)
    }
    code = parts.get("code")
    if "error" not in parts or not (isinstance(code, ast.Constant) and isinstance(code.value, str)):
        return []
    return [CodeEntry(code.value, "error", "", [(words(parts["error"], scope), "")])]


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Return the calls of a function of that name."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]


def argument(call: ast.Call, position: int, name: str, scope: ast.AST) -> str:
    """Return the text of an argument, with … for variable parts; "" if none is constant."""
    value = next((word.value for word in call.keywords if word.arg == name), None)
    if value is None and len(call.args) > position:
        value = call.args[position]
    return words(value, scope)


def words(value: ast.AST | None, scope: ast.AST, depth: int = 0) -> str:
    """Return an expression as text, with … for variable parts."""
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
    """Return the text last assigned to a variable before a line."""
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
