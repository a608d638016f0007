"""python -m tests.software_gpu [--gpus N] [--gib N] [--no-peers] [--reports FILE] -- COMMAND..."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.software_gpu.launcher import Machine, environment_of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.software_gpu", description=sys.modules[__package__].__doc__
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="devices of the machine (1)"
    )
    parser.add_argument(
        "--gib", type=float, default=80, metavar="N", help="memory of each, in GiB (80)"
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="the devices may not read each other's memory"
    )
    parser.add_argument(
        "--reports", type=Path, metavar="FILE", help="append the checker's reports to this file"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("name a command after --")
    machine = Machine(options.gpus, int(options.gib * 2**30), not options.no_peers, options.reports)
    with environment_of(machine) as variables:
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
