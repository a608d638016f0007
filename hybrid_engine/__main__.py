"""`hybrid-engine` and `python -m hybrid_engine`."""

from __future__ import annotations

import os
import signal
import sys

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run a command. Ctrl-C ends it with one line, while modules are imported too."""
    # `plan` has transformers read a config.json, which needs no torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        from hybrid_engine.tools.cli import app

        app()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            "Error: this command needs torch and both engines: pip install '.[gpu]'",
            file=sys.stderr,
        )
        print("in a checkout, or on CPUs make env. `plan` needs neither.", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != _INTERRUPTED:
            raise
        print("Interrupted.", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
