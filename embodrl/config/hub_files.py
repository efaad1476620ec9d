"""Hub files that configuration rules read, fetched before any check."""

from __future__ import annotations

from dataclasses import replace

from embodrl.config.nodes import Node, lookup
from embodrl.config.rules.base import path_kind
from embodrl.config.schema.readers import Verb
from embodrl.errors import ConfigProblem, HubError
from embodrl.hub import DATASET_FACTS, MODEL_FACTS, fetch, parse, parse_dataset

MODEL_KEYS = ("model.model_path", "model.lora_path")
DATA_KEY = "sft.data_dir"


def fetch_facts(tree: Node, verb: Verb | None) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """Fetch the small files of the hub repositories in a configuration, and pin their commits in the tree.

    All rules then apply before gigabytes are downloaded, and all processes of a run use one commit.

    Args:
        tree: configuration tree; branches and tags in it become commits.
        verb: verb that the configuration is for; verbs that use no weights fetch nothing.

    Returns:
        Problems of files that could not be fetched, and notes on the commits.
    """
    problems: list[ConfigProblem] = []
    notes: list[ConfigProblem] = []
    keys = (*MODEL_KEYS, *([DATA_KEY] if verb == "sft" else [])) if verb not in (None, "plan", "collect") else ()
    for key in keys:
        node = lookup(tree, key)
        value = node.value if node is not None else None
        if node is None or not isinstance(value, str) or path_kind(value):
            continue
        name = parse_dataset(value) if key == DATA_KEY else parse(value)
        if name is None or (key != DATA_KEY and name.is_dataset):
            continue
        try:
            place = fetch(name, DATASET_FACTS if key == DATA_KEY else MODEL_FACTS)
        except HubError as error:
            problems.append(ConfigProblem(key, error.message, str(node.origin), hint=error.hint, code=error.code))
            continue
        if not name.is_commit:
            node.value = str(replace(name, revision=place.name))
            message = f"{name} is commit {place.name}"
            hint = f"{key}={node.value} pins this commit"
            notes.append(ConfigProblem(key, message, str(node.origin), hint=hint, code="hub-commit"))
    return problems, notes
