"""``MEGATRON_LM_PATH=checkout python -m tests.megatron_lm [FILE ...]``: how many of Megatron-LM's unit tests pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.megatron_lm.unit_tests import (
    FILES,
    PATH_VARIABLE,
    Outcome,
    by_ranks,
    checkout,
    of_file,
    passed,
    reasons,
    run,
)


def main() -> None:
    source = checkout()
    if source is None:
        sys.exit(f"Name a checkout of Megatron-LM by {PATH_VARIABLE}.")
    for num_ranks, files in by_ranks(sys.argv[1:] or FILES).items():
        without = run(source, files, num_ranks, ["cpu"])
        with_hooks = run(source, files, num_ranks, ["cpu", "hooks"])
        for file in files:
            _print(f"{file}, {num_ranks} ranks", of_file(file, without), of_file(file, with_hooks))


def _print(title: str, without: Mapping[str, Outcome], with_hooks: Mapping[str, Outcome]) -> None:
    same = "the same" if passed(without) == passed(with_hooks) else "NOT THE SAME"
    print(f"{title}: {len(without)} tests")
    print(f"  passed {len(passed(without))} without hooks, {len(passed(with_hooks))} with: {same}")
    for reason, count in reasons(with_hooks).most_common():
        print(f"  {count} {reason}", flush=True)


if __name__ == "__main__":
    main()
