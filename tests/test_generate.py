"""The script that writes the generated messages."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "proto" / "generate.py"


def test_generated_files_are_readable_by_every_user(tmp_path: Path) -> None:
    """Files that root generates are readable by every user who installs the package."""
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__["TARGET"] = tmp_path / "pb"

    assert main([]) == 0
    assert (tmp_path / "pb").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "pb" / "v1beta1" / "__init__.py").is_file()
