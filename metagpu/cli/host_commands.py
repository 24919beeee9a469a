"""The command `install`, which changes this host."""

import argparse
import sysconfig
from pathlib import Path

from metagpu.host.service_files import FileState, service_files


def install(args: argparse.Namespace) -> int:
    """Write the files of the service that are missing; say what comes next.

    Raises:
        MetagpuError: a file cannot be written.
    """
    for file in service_files(installed_program(), args.root, mps=args.mps):
        match file.state:
            case FileState.SAME:
                _say(f"kept     {file.path}")
            case FileState.CHANGED:
                _say(f"kept     {file.path}: it differs from this version's; remove it to get that")
            case FileState.MISSING if args.dry_run:
                _say(f"missing  {file.path}")
            case FileState.MISSING:
                file.write()
                _say(f"wrote    {file.path}")

    _say("\nnext: edit /etc/metagpu/metagpu.yaml, then")
    _say("  systemctl daemon-reload && systemctl enable --now metagpu")
    return 0


def installed_program() -> Path:
    """Return the path of this installation's program."""
    return Path(sysconfig.get_path("scripts")) / "metagpu"


def _say(line: str) -> None:
    print(line)  # noqa: T201 - a command line speaks so
