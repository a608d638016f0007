"""What errors with many findings say."""

from __future__ import annotations

from hybrid_engine.errors import ConfigError, Violation


def test_violations_that_differ_in_numbers_alone_have_one_line() -> None:
    wrong = [Violation(f"prompts[{row}]", f"{row % 7} keys", 'Pass "prompt"') for row in range(7473)]
    error = ConfigError([*wrong, *(Violation(f"servers[{row}]", "silent", "Start it") for row in range(3))])
    assert str(error).splitlines() == [
        "invalid configuration (7476):",
        '  - prompts[0]: 0 keys. Pass "prompt" (7,473 of this kind, the others at prompts[1], prompts[2], prompts[3] '
        "and 7469 more)",
        "  - servers[0]: silent. Start it",
        "  - servers[1]: silent. Start it",
        "  - servers[2]: silent. Start it",
    ]
    assert len(error.findings) == 7476


def test_an_error_of_many_kinds_is_cut() -> None:
    letters = [chr(ord("a") + one) + chr(ord("a") + other) for one in range(26) for other in range(26)]
    lines = str(ConfigError([Violation(key, "is wrong", "Change it") for key in letters])).splitlines()
    assert len(lines) == 202
    assert lines[-1] == "  - and 476 more"
