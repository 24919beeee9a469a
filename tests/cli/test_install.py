"""`metagpu install --systemd` writes a service that systemd takes, and nothing twice."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from docs import manpages
from metagpu.cli.metagpu import main
from metagpu.core.config.config import parse
from metagpu.core.contracts.backend import installed_backends
from metagpu.host.service import read_environment

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
EXPOSURE = 30
"""The most that `systemd-analyze security` may find, in tenths."""


def install(root: Path, *options: str) -> int:
    """Install the service below a root."""
    return main(["install", "--systemd", "--root", str(root), *options])


def test_a_service_is_installed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Units, options and an example come; what an operator has changed stays."""
    assert install(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "systemctl enable --now metagpu" in printed
    unit = tmp_path / "etc/systemd/system/metagpu.service"
    assert f"ExecStart={sysconfig.get_path('scripts')}/metagpu run" in unit.read_text()
    settings = tmp_path / "etc/metagpu/metagpu.yaml"
    assert str(settings) in printed

    settings.write_text("version: metagpu/v1\n")
    assert install(tmp_path, "--mps") == 0
    again = capsys.readouterr().out
    assert settings.read_text() == "version: metagpu/v1\n"
    assert f"kept     {settings}: it differs" in again
    drop_in = tmp_path / "etc/systemd/system/metagpu.service.d/mps.conf"
    assert [line for line in again.splitlines() if line.startswith("wrote")] == [
        f"wrote    {drop_in}"
    ]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run lists what is missing."""
    assert install(tmp_path, "--dry-run") == 0
    assert "missing " in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says where and what to do."""
    (tmp_path / "etc").write_text("")
    assert install(tmp_path) == 1
    assert "--root" in capsys.readouterr().err


def test_the_kind_of_service_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --systemd there is nothing to install."""
    with pytest.raises(SystemExit):
        main(["install"])
    assert "--systemd" in capsys.readouterr().err


def test_the_example_is_good(tmp_path: Path) -> None:
    """The example's configuration is valid, and the options name it."""
    assert install(tmp_path) == 0
    folder = tmp_path / "etc/metagpu"
    parse((folder / "metagpu.yaml").read_text(), "metagpu.yaml", installed_backends())
    given = read_environment(folder / "metagpu.env")
    assert given == {"METAGPU_CONFIG": "/etc/metagpu/metagpu.yaml"}


def test_the_wheel_has_the_files(tmp_path: Path) -> None:
    """The wheel has the files of deploy/systemd, so that there is one source, and manual pages."""
    manpages.write()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # noqa: S603 - our own
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for file in SYSTEMD.iterdir():
            assert archive.read(f"metagpu/systemd/{file.name}") == file.read_bytes()
        shared = [Path(name).name for name in archive.namelist() if "/data/share/man/man1/" in name]
    assert sorted(shared) == ["kubectl-metagpu.1", "metagpu.1", "mgctl.1"]


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Install the service below a root; skip without systemd's own checks."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("Debian's package systemd has systemd-analyze, which this machine lacks")
    assert install(tmp_path, "--mps") == 0
    return tmp_path / "etc/systemd/system"


def test_systemd_takes_the_units(units: Path) -> None:
    """`systemd-analyze verify` finds nothing."""
    command = ["systemd-analyze", "verify", "--man=no", str(units / "metagpu.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stderr) == (0, "")


def test_the_service_stays_hardened(units: Path) -> None:
    """The service exposes no more than it did: docs/permissions.md has each option."""
    shutil.rmtree(units / "metagpu.service.d")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}"]
    done = subprocess.run(  # noqa: S603 - as above
        [*command, "--no-pager", str(units / "metagpu.service")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_service_starts_before_the_kubelet() -> None:
    """Every kubelet that docs/distributions name starts after it, and none depends on it."""
    unit = (SYSTEMD / "metagpu.service").read_text().splitlines()
    before = {name for line in unit if line.startswith("Before=") for name in line[7:].split()}
    assert {"kubelet.service", "k3s.service", "k3s-agent.service"} <= before
    assert not [line for line in unit if line.startswith("RequiredBy=")]
    assert "KillMode=process" in unit
