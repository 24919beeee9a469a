"""Files that are replaced as a whole."""

import os
from pathlib import Path

from metagpu.core.runtime.files import replace_text


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A reader that has the file open keeps the old text; everybody may read the new one."""
    path = tmp_path / "not-yet" / "file"
    usual = os.umask(0o077)
    try:
        replace_text(path, "old, and longer\n")
        with path.open() as reader:
            replace_text(path, "neu: ä\n")
            assert reader.read() == "old, and longer\n"
    finally:
        os.umask(usual)

    assert path.read_text(encoding="utf-8") == "neu: ä\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]
