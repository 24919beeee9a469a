"""The script that writes the generated messages."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "proto" / "generate.py"


def test_what_is_generated_may_be_read_by_all(tmp_path: Path) -> None:
    """Whoever installs from a tree that root generated can read the package."""
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__["TARGET"] = tmp_path / "pb"

    assert main([]) == 0
    assert (tmp_path / "pb").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "pb" / "v1beta1" / "__init__.py").is_file()
