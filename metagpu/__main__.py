"""`python -m metagpu` is `metagpu`."""

import gc
import sys


def main() -> int:
    """Run one command; give the exit status, also to who interrupts it before it has begun."""
    try:
        # Nothing of what is loaded is garbage, and looking for some took a tenth of a start.
        gc.disable()
        from metagpu.cli import main as command  # noqa: PLC0415 - behind the line above

        gc.freeze()
        gc.enable()
        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
