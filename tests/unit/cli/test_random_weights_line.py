"""The first line of a verb says that the policy would be random."""

from __future__ import annotations

import pytest

from embodrl.cli.main import main


@pytest.mark.parametrize("verb", [["config", "validate"], ["plan", "train"]])
@pytest.mark.parametrize(("model", "random"), [("pi05", True), ("openvla", False)])
def test_the_first_line_says_that_weights_are_random(
    verb: list[str], model: str, random: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["embodrl", *verb, "env=toy", f"model={model}"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.splitlines()[0].startswith("random weights") == random
