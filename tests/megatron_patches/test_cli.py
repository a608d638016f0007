"""``python -m megatron_patches list``."""

from __future__ import annotations

import megatron.core
import pytest
from typer.testing import CliRunner

from megatron_patches.__main__ import app, main
from megatron_patches.applying import default_groups, patches_of
from megatron_patches.patch import Patch

PATCHES = patches_of()


def unneeded_patches() -> list[Patch]:
    return [patch for patch in PATCHES if not patch.is_needed_by(megatron.core.__version__)]


def test_list_shows_every_patch_and_its_state() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0, result.output
    for patch in PATCHES:
        for text in (patch.name, f"[{patch.group}]", patch.target, patch.reason):
            assert text in result.output
    for patch in unneeded_patches():
        assert f"not needed {f'before megatron-core {patch.since}' if patch.since else 'from'}" in result.output
    others = [patch for patch in PATCHES if patch.group not in default_groups() and patch not in unneeded_patches()]
    assert result.output.count("not needed") == len(unneeded_patches())
    assert result.output.count("not applied") == len(others)


def test_list_without_check_applies_nothing() -> None:
    result = CliRunner().invoke(app, ["list", "--no-check"])
    assert result.output.count("not applied") == len(PATCHES) - len(unneeded_patches())


def test_list_says_when_the_patches_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.1.0")
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 1
    assert "0.1.0" in result.output


def test_a_command_that_is_misspelt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["megatron_patches", "patch-sorce"])
    with pytest.raises(SystemExit, match="Did you mean patch-source"):
        main()
