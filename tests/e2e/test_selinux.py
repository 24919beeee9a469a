"""The module of deploy/selinux, linked with a real policy: that of Debian's archive.

Nothing is installed, and nothing enforces it: this is no test on a host with SELinux.
"""

import bz2
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.rig.go_programs import cache_root
from tests.e2e.rig.tools import REPOSITORY

MODULE: Final = REPOSITORY / "deploy" / "selinux" / "metagpu.cil"
PACKAGES: Final = ("secilc", "libsepol2", "policycoreutils", "selinux-policy-default")
CONTAINERS: Final = """
(typeattribute container_domain)
(typeattribute container_net_domain)
(typeattribute svirt_sandbox_domain)
(typeattributeset container_domain (container_t))
(type container_t) (roletype system_r container_t)
(type kubelet_t) (roletype system_r kubelet_t)
(type container_runtime_t) (roletype system_r container_runtime_t)
(typeattributeset domain (container_t kubelet_t container_runtime_t))
(type container_var_lib_t) (roletype object_r container_var_lib_t)
(type container_file_t) (roletype object_r container_file_t)
(type container_log_t) (roletype object_r container_log_t)
(typeattributeset file_type (container_var_lib_t container_file_t container_log_t))
"""
"""The names of container-selinux that the module uses; Debian does not have it."""


@pytest.fixture(scope="module")
def policy() -> Path:
    """Return a folder with the compiler, in `usr`, and Debian's base policy as `base.cil`."""
    target = cache_root() / "selinux"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        folder = Path(work) / "root"
        folder.mkdir()
        if shutil.which("apt-get") is None:
            pytest.skip("the module of SELinux is not compiled: there is no apt-get here")
        # apt's own download user may not enter a home folder.
        fetch = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *PACKAGES]
        done = subprocess.run(fetch, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the module of SELinux is not compiled: {done.stderr.strip()[-200:]}")
        for file in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", file.name, "."], cwd=folder, check=True)
        packed = folder / "usr/share/selinux/default/base.pp.bz2"
        (folder / "base.pp").write_bytes(bz2.decompress(packed.read_bytes()))
        converter = folder / "usr/libexec/selinux/hll/pp"
        run(folder, converter, "base.pp", "whole.cil")
        # The users of its SELinux-aware programs need their modules.
        lines = (folder / "whole.cil").read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("(selinuxuser")]
        (folder / "base.cil").write_text("".join(kept))
        folder.rename(target)
    return target


def run(folder: Path, program: Path, *arguments: str) -> str:
    """Run a program of the folder's packages there; return what it prints when it fails."""
    [libraries] = folder.rglob("libsepol.so.2")
    done = subprocess.run(
        [str(program), *arguments],
        cwd=folder,
        env=os.environ | {"LD_LIBRARY_PATH": str(libraries.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{done.stderr or done.stdout or 'failed'}" if done.returncode else ""


def link(policy: Path, module: str, work: Path) -> str:
    """Link the module with the policy, never-allow rules and all; return the error."""
    (work / "containers.cil").write_text(CONTAINERS)
    (work / "metagpu.cil").write_text(module)
    files = [str(work / name) for name in ("containers.cil", "metagpu.cil")]
    out = ["-M", "true", "-o", str(work / "policy"), "-f", str(work / "contexts")]
    return run(policy, policy / "usr/bin/secilc", *out, "base.cil", *files)


def test_the_module_fits_a_real_policy(policy: Path, tmp_path: Path) -> None:
    """Every type, class and permission exists, and no rule is one that the policy never allows."""
    module = MODULE.read_text()

    assert link(policy, module, tmp_path) == ""
    label = "/var/lib/metagpu(/.*)?\tsystem_u:object_r:container_file_t:s0"
    assert label in (tmp_path / "contexts").read_text()
    wrong = link(policy, module.replace("(signull signal sigkill)", "(kill)"), tmp_path)
    assert "Failed to resolve allow statement" in wrong
