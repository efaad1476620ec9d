"""Names of other systems lead to the right one here."""

from __future__ import annotations

import pytest

from embodrl.config import load_config
from embodrl.config.foreign import FOREIGN
from embodrl.config.presets import groups, presets
from embodrl.errors import ConfigError
from embodrl.specs import ADVANTAGES, LOSSES


@pytest.mark.parametrize(("key", "name"), FOREIGN)
def test_a_name_of_another_system_is_answered(key: str, name: str) -> None:
    near, hint = FOREIGN[key, name]
    with pytest.raises(ConfigError) as caught:
        load_config(["env=toy", "model.warm_start=null", f"{key}='{name.upper()}'"])
    (problem,) = [found for found in caught.value.problems if found.key == key]
    assert (problem.nearest, problem.hint) == (near, hint)
    known = {"algorithm.adv_type": ADVANTAGES.names, "algorithm.loss_type": LOSSES.names}
    names = known[key]() if key in known else presets(key)
    assert name not in names and (near in names or not near) and (key in groups() or key in known)
