"""The command `metagpu`, as `python -m metagpu`."""

import gc
import sys


def main() -> int:
    """Run one command; return the exit status, 130 for an interrupt."""
    try:
        gc.disable()  # no loaded module becomes garbage
        from metagpu.cli.metagpu import main as command  # noqa: PLC0415 - inside the `try`

        gc.freeze()
        gc.enable()
        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
