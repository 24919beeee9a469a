"""The script that writes the generated messages."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "proto" / "generate.py"


def test_generated_files_are_readable_by_every_user(tmp_path: Path) -> None:
    """Files that root generates are readable by every user who installs the package."""
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__["ROOT"] = tmp_path

    assert main([]) == 0
    for package, module in (("plugins/kubelet", "v1beta1"), ("sim/allocation", "cel/expr")):
        pb = tmp_path / "metagpu" / package / "pb"
        assert pb.stat().st_mode & 0o777 == 0o755
        assert (pb / module / "__init__.py").is_file()
