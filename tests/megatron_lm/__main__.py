"""``MEGATRON_LM_PATH=checkout python -m tests.megatron_lm [FILE ...]``: how many of Megatron-LM's unit tests pass."""

from __future__ import annotations

import sys

from tests.megatron_lm.unit_tests import FILES, PATH_VARIABLE, checkout, passed, reasons, run


def main() -> None:
    source = checkout()
    if source is None:
        sys.exit(f"Name a checkout of Megatron-LM by {PATH_VARIABLE}.")
    for file in sys.argv[1:] or FILES:
        without = run(source, file, FILES.get(file, 2), ["cpu"])
        with_hooks = run(source, file, FILES.get(file, 2), ["cpu", "hooks"])
        same = "the same" if passed(without) == passed(with_hooks) else "NOT THE SAME"
        print(f"{file}, {FILES.get(file, 2)} ranks: {len(without)} tests")
        print(f"  passed {len(passed(without))} without hooks, {len(passed(with_hooks))} with: {same}")
        for reason, count in reasons(with_hooks).most_common():
            print(f"  {count} {reason}", flush=True)


if __name__ == "__main__":
    main()
