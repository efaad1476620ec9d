"""The page configuration.md of the documentation site, from the schema, the presets and the rules.

scripts/docs_hooks.py adds it to the site; python scripts/make_config_reference.py prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from embodrl.config.check import model_of, shipped_schemas
from embodrl.config.presets import describe, groups, presets
from embodrl.config.rules import Rule, shipped_rules
from embodrl.config.schema import EnvConfig, ModelConfig, env_settings, model_settings
from embodrl.config.schema.readers import readers
from embodrl.config.schema.section import ReadBy
from embodrl.pipelines.select import PipelineCheck
from embodrl.specs import ENVS, MODELS
from embodrl.tools.explain.keys import allowed, conditions, default, is_section, read_by

HEAD = ("| key | default | allowed | meaning |", "|---|---|---|---|")

INTRODUCTION = """\
# Configuration

<!-- Made by scripts/make_config_reference.py from the schema, the presets and the rules: change those instead. -->

A configuration is a tree of sections. Four layers make it; the later wins:

1. the defaults of the schema, listed below;
2. presets, one of each group, chosen as `group=name` (`embodrl list presets`); an `experiment` may choose several;
3. a YAML file of your own, given with `--config FILE`;
4. single values on the command line, as `section.key=value`.

```
embodrl train env=maniskill_mix model=openvla runner.seed=3 'env.tasks=[PushCube-v1,PullCube-v1]'
embodrl train --config mine.yaml algorithm.gamma=0.99
embodrl config show env=maniskill        # every value, and where it came from
embodrl config validate --config mine.yaml   # exit code 0, or 2 and all problems in one report
```

A file of your own names presets and states values:

```yaml
presets: {env: maniskill_pull, model: openvla}
runner:
  seed: 3
  name: pull-${runner.seed}   # a reference to another key
env:
  train: {total_num_envs: 64}
```

Presets of your own are found by name beside those of embodrl: files `GROUP/NAME.yaml` in `~/.config/embodrl`
(`$XDG_CONFIG_HOME/embodrl`), in directories given with `--presets DIR`, or named in your file, relative to it:
`presets: {dirs: [my_presets], env: my_env}`. `embodrl list presets` shows where each comes from. A name that is taken
is refused, whether or not it is chosen.

```yaml
# The first comment is what `embodrl list presets` shows. This is my_presets/env/my_env.yaml
defaults:
  - toy     # another preset of the group, to begin with
  - _self_
max_episode_steps: 12
```

An experiment begins with `# @package _global_` and chooses presets with `defaults: [{override /env: my_env}]`; its
settings have their sections (`runner: {seed: 3}`). A run keeps its whole configuration, so that it is resumed without
the presets. Settings that run code are taken from your own files only ([security.md](security.md)).

- **Arguments** follow Hydra's grammar: `key=value`, lists `[a,b]`, mappings `{a: 1}`, `null`, `true`, quoted text.
  `+key=value` is the same as `key=value`: a plus makes no unknown key known. `~key` goes back to the default of the
  schema. If a key is given twice, the last one counts. A run has one configuration, so sweeps (`a=1,2`) are refused.
- **Types** are strict: `'3'` is text, not a number; `true` is not 1; an integer will do where a number is wanted.
  In YAML files `yes`, `no`, `on` and `off` are text, as in YAML 1.2, and `1e-3` is a number.
- **Unknown keys** are errors, and so is a key given twice in one mapping.
- **References** `${section.key}` take the value of another key. Resolvers such as `${oc.env:HOME}` are refused, so
  that a configuration means the same on every machine.
- **No code** is run from a configuration: YAML tags, `_target_` and the like are errors. The exceptions are deliberate:
  `extensions` names modules to import, which may register models and environments, and `algorithm.adv_type`,
  `algorithm.loss_type`, `algorithm.srpo.encoder`, `reward.fn` and `pipeline.fn` may name custom functions as
  `module:function`.
- **Mappings** are merged key by key, lists are replaced; `cluster.component_placement` is replaced as a whole.
- **Verbs** that read a key or a section stand in brackets below, `[eval, train]`, where not all do; what a key says
  wins over what its section says. `plan` reads what `train` reads, and `record` is `collect policy=PATH`. On a command
  line other verbs refuse the key. In a file they ignore it: verbs share files.
- A run writes its whole configuration to `DIR/config.yaml`. That file can be given with `--config` again.

A wrong configuration is refused before torch or a simulator is imported, with all its problems in one report: the key,
the file and line or the argument, what is allowed, the nearest name, and what to write instead.
"""

PLACEMENT = """\
## Placement

`cluster.component_placement` maps components to devices: `actor,rollout: 0`. A place is `all`, or pieces
`devices[:processes]` separated by commas, each a rank or a range: `0`, `0-3`, `0-1:0-3` (two devices, four processes);
`LABEL/0-3` counts the devices of a node group. Every component (`actor`, `rollout`, `env`) is placed exactly once.
A machine without a GPU has one device, the CPU. The backend `native` is one process on one device,
so actor and rollout are placed on `all` or on one device, the same for both. [placement.md](placement.md) has more, and
`embodrl plan train` shows what follows.
"""


def cell(text: str) -> str:
    """Return text that is safe in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def row(name: str, info: FieldInfo) -> str:
    """Return the line about a key."""
    shown = default(info) if info.default is PydanticUndefined else f"`{default(info)}`"
    more = ", see below" if model_of(info.annotation) is not None else ""
    about = (info.description or "") + remarks(info)
    return f"| `{name}` | {cell(shown)} | {cell(allowed(info) + more)} | {cell(about)} |"


def remarks(info: FieldInfo) -> str:
    """Say which verbs read a key or section, and with which other settings."""
    said = [f"`{key}`{equals}{values}" for key, equals, values in (each.partition("=") for each in conditions(info))]
    verbs = next((each.verbs for each in info.metadata if isinstance(each, ReadBy)), None)
    return (f" (only with {' and '.join(said)})" if said else "") + read_by_only(verbs)


def read_by_only(verbs: Collection[str] | None) -> str:
    """Say which verbs read something, if not all do."""
    return f" (read by {read_by(verbs)})" if verbs is not None else ""


def section(
    model: type[BaseModel],
    key: str,
    about: str,
    common: type[BaseModel] | None = None,
) -> list[str]:
    """Return the lines about a section and the sections in it; those of ``common`` are described elsewhere."""
    rows: list[str] = []
    inner: list[str] = []
    for name, info in model.model_fields.items():
        if common is not None and name in common.model_fields:
            continue
        found = model_of(info.annotation)
        if found is not None and is_section(info.annotation):
            inner += section(found, f"{key}.{name}", (info.description or "") + remarks(info))
            continue
        rows.append(row(name, info))
        if found is not None:
            inner += section(found, f"{key}.{name}[i]", "an item of the list")
    title = f"{about[:1].upper()}{about[1:]}."
    return ([f"### `{key}`", "", title, "", *HEAD, *rows, ""] if rows else []) + inner


def schema_part() -> list[str]:
    """Return the tables of all keys."""
    lines = ["## Keys", ""]
    top = ["### Top level", "", *HEAD]
    schema = shipped_schemas()[0]
    sections = {"env": EnvConfig, "model": ModelConfig}  # without what the simulators and families add, which follows
    for name, info in schema.model_fields.items():
        found = sections.get(name) or model_of(info.annotation)
        if found is None:
            top.append(row(name, info))
        else:
            lines += section(found, name, (info.description or "") + read_by_only(readers(name, schema)))
            lines += own_settings(name)
    return [*lines, *top, ""]


def own_settings(name: str) -> list[str]:
    """Return the tables of what each simulator adds to ``env``, or each family to ``model``."""
    kinds = {"env": (ENVS, env_settings, EnvConfig), "model": (MODELS, model_settings, ModelConfig)}
    if name not in kinds:
        return []
    registry, settings_of, base = kinds[name]
    classes: dict[type[BaseModel], list[str]] = {}
    for spec in registry.builtin:
        classes.setdefault(settings_of(spec), []).append(spec)
    lines: list[str] = []
    for cls, specs in classes.items():
        # a family may add to what another one has
        above = next((parent for parent in cls.__mro__[1:] if parent in classes), base)
        owners = " and ".join(specs)
        text = f"Settings of {owners}"
        text += f" beside those of {' and '.join(classes[above])}" if above in classes and above is not base else ""
        for line in section(cls, name, text, above):
            lines.append(line.replace(f"### `{name}", f"### {owners}: `{name}") if line.startswith("###") else line)
    return lines


def preset_part() -> list[str]:
    """Return the table of presets."""
    lines = ["## Presets", "", "| choice | what it is |", "|---|---|"]
    lines += [f"| `{group}={name}` | {cell(describe(group, name))} |" for group in groups() for name in presets(group)]
    return [*lines, ""]


def rule_rows(rules: list[Rule]) -> list[str]:
    """Return a table of rules."""
    rows = ["| rule | keys |", "|---|---|"]
    for rule in rules:
        text = (rule.check.__doc__ or "").strip().partition("\n")[0]
        rows.append(f"| {cell(text)} | {', '.join(f'`{key}`' for key in rule.keys)} |")
    return [*rows, ""]


def page() -> str:
    """Return the whole page."""
    shipped = shipped_rules()
    rules = ["## Rules between keys", "", "A configuration that breaks one of these is refused.", ""]
    rules += rule_rows([*shipped.rules, PipelineCheck().rule])
    notes = ["A configuration that is odd in one of these ways is accepted, with a note.", ""]
    notes += rule_rows(shipped.notes)
    return "\n".join([INTRODUCTION, *preset_part(), *schema_part(), PLACEMENT, *rules, *notes]).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
