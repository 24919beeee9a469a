"""Files that are replaced as a whole."""

import os
from pathlib import Path

import pytest

from metagpu.core.runtime.files import is_noexec, replace_text


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


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        ("/ rw", False),
        ("/ rw,noexec", True),
        ("/ rw,noexec|{0} rw,relatime", False),
        ("/ rw|{0} rw,nosuid,noexec|{0}/pod/mgctl rw", True),
        ("/ rw|{0} rw,noexec|{0}p rw", True),
        ("/ rw|{0} rw,noexec|{0} rw", False),
        ("/ rw|{0} rw|{0} rw,noexec", True),
    ],
)
def test_the_hosts_mounts_tell_whether_programs_start(
    tmp_path: Path, mounts: str, *, expected: bool
) -> None:
    """The innermost mount of the folder counts, as the host's first process sees it."""
    folder = tmp_path / "a folder" / "pod"
    folder.mkdir(parents=True)
    (tmp_path / "1").mkdir()
    where = mounts.format(str(folder.parent).replace(" ", r"\040"))
    lines = (f"36 35 98:0 / {mount} shared:1 - ext4 /dev/sda1 rw" for mount in where.split("|"))
    (tmp_path / "1" / "mountinfo").write_text("\n".join(lines) + "\n")
    assert is_noexec(folder, tmp_path) is expected


@pytest.mark.parametrize("name", [b"\xe4", "ä".encode(), b"\v\f", "\x85\u2028".encode(), b"\\ #"])
def test_a_mount_point_may_have_any_bytes(tmp_path: Path, name: bytes) -> None:
    """A point is what the kernel names, in no encoding, whatever other points are called."""
    folder = tmp_path / os.fsdecode(name) / "pod"
    folder.mkdir(parents=True)
    (tmp_path / "1").mkdir()
    point = os.fsencode(folder.parent)
    for octal in b"\\ \t\n#":  # as the kernel does, the backslash first
        point = point.replace(bytes([octal]), b"\\%03o" % octal)
    lines = b"1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / %b noexec - ext4 a rw\n" % point
    (tmp_path / "1" / "mountinfo").write_bytes(lines)
    assert is_noexec(folder, tmp_path)
    assert not is_noexec(tmp_path, tmp_path)


def test_unreadable_mounts_leave_the_folders_own(tmp_path: Path) -> None:
    """Without the host's processes, only the mount here is known."""
    assert not is_noexec(tmp_path, tmp_path)
