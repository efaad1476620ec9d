"""Entries about keys and codes, as text for a terminal."""

from __future__ import annotations

import textwrap

from embodrl.config.check import model_of, options_of
from embodrl.tools.explain.codes import CURES, CodeEntry
from embodrl.tools.explain.keys import (
    CHOSEN_BY,
    Setting,
    allowed,
    children,
    conditions,
    default,
    facts_wanted,
    in_presets,
    rules_of,
    type_of,
    verbs_of,
)

WIDTH = 110
KINDS = {
    "class": "an error",
    "error": "an error",
    "problem": "a problem of a configuration, an argument or a pipeline",
    "rule": "a rule between settings; a configuration that breaks it is refused",
    "note": "a note; nothing is stopped",
}


def key_text(settings: list[Setting]) -> str:
    """Return the entry of a key or section, with all definitions by simulators or families."""
    parts = [settings[0].key]
    for setting in settings:
        parts += _definition(setting)
    for setting in settings:
        parts += _children(setting)
    found = [(kind, rule.code, (rule.check.__doc__ or "").strip()) for kind, rule in rules_of(settings[0].key)]
    if found:
        parts += ["", "rules and notes:"]
        parts += [_item(f"{code}{' (note)' * (kind == 'note')}: {_first(doc)}") for kind, code, doc in found]
    return "\n".join(parts)


def _definition(setting: Setting) -> list[str]:
    info = setting.info
    facts: dict[str, str] = {"": _sentence(info.description or "")}
    if setting.owners:
        facts["of"] = ", ".join(f"{CHOSEN_BY[setting.key.partition('.')[0]]}={owner}" for owner in setting.owners)
    if not setting.is_section:
        facts |= {"type": type_of(info), "default": default(info), "allowed": allowed(info)}
        if facts["allowed"] == facts["type"]:
            del facts["allowed" if model_of(info.annotation) or not options_of(info.annotation, []) else "type"]
    facts["presets"] = "" if setting.is_section else in_presets(setting.key)
    applies = list(dict.fromkeys(text for field in setting.fields for text in conditions(field)))
    facts["only with"] = " and ".join(applies)
    reasons = dict.fromkeys(text for field in setting.fields for text in facts_wanted(field))
    facts["no effect"] = "; ".join(f"if {text}" for text in reasons)
    facts["read by"] = verbs_of(setting) or "all verbs with a configuration"
    return ["", *(_fact(name, text) for name, text in facts.items() if text)]


def _children(setting: Setting) -> list[str]:
    lines: list[str] = []
    for child in children(setting):
        value = "section" if child.is_section else default(child.info)
        owners = f" ({', '.join(child.owners)})" if child.owners else ""
        lines.append(_item(f"{child.key} = {value}{owners}: {child.info.description or ''}"))
    return ["", "keys:" if setting.is_section else "keys of an item:", *lines] if lines else []


def code_text(entry: CodeEntry) -> str:
    """Return the entry of a code: each message with its cure."""
    parts = [f"{entry.code}: {KINDS[entry.kind]}"]
    hints: dict[str, list[str]] = {}
    for cause, cure in entry.cases:
        known = hints.setdefault(cause, [])
        known += [cure] if cure.strip(" …/") and cure not in known else []
    for cause, cures in hints.items():
        if cause.strip(" …/"):
            parts += ["", _fact("message" if entry.kind in ("error", "problem") else "cause", " ".join(cause.split()))]
            parts += [_fact("hint", " ".join(cure.split())) for cure in cures]
    if not any(hints.values()):
        parts.append(_fact("hint", CURES.get(entry.code, "follow the hint in the message")))
    return "\n".join(parts)


def _first(doc: str) -> str:
    return doc.partition("\n")[0]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _fact(name: str, text: str) -> str:
    head = f"  {name + ':' if name else '':<11}" if name else "  "
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)


def _item(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_long_words=False)
