"""Messages of errors with many findings."""

from __future__ import annotations

import itertools
import string
import traceback

from hybrid_engine.errors import ConfigError, Violation, is_of_user


def test_the_runner_of_modules_is_not_the_users() -> None:
    frames = [traceback.FrameSummary(file, 88, "run") for file in ("<frozen runpy>", "job.py")]
    assert [is_of_user(frame) for frame in frames] == [False, True]


def test_violations_that_differ_only_in_an_index_share_a_line() -> None:
    wrong = [
        Violation(f"prompts[{row}]", "a dict of 2 keys", 'Pass "prompt"') for row in range(7473)
    ]
    error = ConfigError(
        [*wrong, *(Violation(f"servers[{row}]", "silent", "Start it") for row in range(3))]
    )
    assert str(error).splitlines() == [
        "invalid configuration (7476):",
        '  - prompts[0]: a dict of 2 keys. Pass "prompt" (7,473 of this kind, the '
        "others at prompts[1], prompts[2], "
        "prompts[3] and 7469 more)",
        "  - servers[0]: silent. Start it",
        "  - servers[1]: silent. Start it",
        "  - servers[2]: silent. Start it",
    ]
    assert len(error.findings) == 7476


def test_violations_of_one_code_and_remedy_share_a_line() -> None:
    """Arguments in the wrong order are 7,473 rewards that are no functions."""
    wrong = [Violation(f"reward {row}", f"{row}", "Swap", code="not-callable") for row in range(9)]
    others = [Violation("reward 0", "0", "Swap", code=f"code-{row}") for row in range(4)]
    assert str(ConfigError(wrong + others)).splitlines()[1:] == [
        "  - reward 0: 0. Swap (9 of this kind, the others at reward 1, reward 2, "
        "reward 3 and 5 more)",
        *["  - reward 0: 0. Swap"] * 4,
    ]
    types = [Violation(f"layer_types.{row}", "5", "Use names", code="type") for row in range(4)]
    assert len(str(ConfigError(types)).splitlines()) == 2


def test_violations_with_other_values_or_remedies_have_separate_lines() -> None:
    values = [Violation(f"rewards[{row}]", f"is {row}.5", "Use finite numbers") for row in range(4)]
    remedies = [Violation("size", "is 3", f"Set it to {size}") for size in (4, 8, 16, 32)]
    keys = [Violation(f"layer{number}", "is wrong", "Change it") for number in range(4)]
    texts = [Violation("reward", f"is nan for {row}", "Fix it", code="bad") for row in range(4)]
    findings = values + remedies + keys + texts
    assert str(ConfigError(findings)).splitlines()[1:] == [f"  - {finding}" for finding in findings]


def test_long_lists_of_violations_are_truncated() -> None:
    keys = map("".join, itertools.product(string.ascii_lowercase, repeat=2))
    lines = str(ConfigError([Violation(key, "is wrong", "Change it") for key in keys])).splitlines()
    assert len(lines) == 202
    assert lines[-1] == "  - and 476 more"
