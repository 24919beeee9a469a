"""`metagpu` with the processes of a simulated host: its own /proc, cgroups and container logs.

`python -m bench.contained FOLDER run ...`, where FOLDER is that of a `SimHost`. With `--nvml-costs`
before it, NVML's calls take as long as those of a real one.
"""

import sys
from functools import partial
from pathlib import Path

from metagpu.host import linux


def main() -> int:
    """Run one command with that host in place of this machine."""
    if sys.argv[1] == "--nvml-costs":
        from bench.nvml_costs import add_costs  # noqa: PLC0415 - only where it is wanted

        del sys.argv[1]
        add_costs()
    folder = Path(sys.argv.pop(1))
    paths = [folder / name for name in ("proc", "containers", "cgroup")]
    vars(linux)["LinuxHost"] = partial(linux.LinuxHost, *paths)
    from metagpu.__main__ import main as command  # noqa: PLC0415 - after the exchange

    return command()


if __name__ == "__main__":
    sys.exit(main())
