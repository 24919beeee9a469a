"""Each import contract refuses a forbidden import that is planted in a copy of the tree.

Contracts that list modules once were all "kept" while pynvml, grpclib and subprocess were imported
where they may not be. A contract that is only seen to pass shows nothing.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[1]
PLANTED: Final = {
    "layers": {"core/model/planted.py": "import metagpu.plugins.kubelet.endpoint"},
    "testing": {"testing/planted.py": "import metagpu.backends.fraction.backend"},
    "core-layers": {"core/model/planted.py": "import metagpu.core.usage.enforcer"},
    "backends": {"backends/fraction/planted.py": "import metagpu.backends.mig.backend"},
    "plugins": {"plugins/metrics/planted.py": "import metagpu.plugins.cluster.client"},
    "no-cycles": {
        "nvml/planted.py": "import metagpu.nvml.planted_too",
        "nvml/planted_too.py": "import metagpu.nvml.planted",
    },
    "grpc": {"agent/planted.py": "import grpclib"},
    "api-server": {"plugins/cluster/planted.py": "import kubernetes_asyncio"},
    "nvml": {"plugins/metrics/planted.py": "import pynvml"},
    "cel": {"agent/planted.py": "import cel_expr_python"},
    "programs": {"backends/mps/planted.py": "import subprocess"},
    "metrics-libraries": {"plugins/metrics/planted.py": "import prometheus_client"},
}
"""For each contract: what is planted, by file below the package."""

EXHAUSTIVE: Final = {
    "layers": "planted",
    "core-layers": "core/planted",
    "backends": "backends/planted",
    "plugins": "plugins/planted",
}
"""For each contract that names all packages of one place: a package that it does not name."""

PROGRAMS: Final = (
    "import subprocess",
    "import multiprocessing",
    "from anyio import open_process",
    "from anyio import run_process",
    "from asyncio import create_subprocess_exec",
    "from asyncio import create_subprocess_shell",
    "from concurrent.futures import ProcessPoolExecutor",
    "from os import execv",
    "from os import fork",
    "from os import popen",
    "from os import posix_spawn",
    "from os import spawnv",
    "from os import system",
    "import pty",
)


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """Copy the package and the import contracts once for all tests of this file."""
    ignored = shutil.ignore_patterns("__pycache__", "mgctl-*")
    with tempfile.TemporaryDirectory(prefix="mg") as folder:
        tree = Path(folder)
        shutil.copytree(ROOT / "metagpu", tree / "metagpu", ignore=ignored)
        (tree / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
        yield tree


@pytest.fixture(scope="module")
def unplanted(tree: Path) -> str:
    """Check all contracts of the tree as it is."""
    done = check_contracts(tree, *PLANTED)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def copy(tree: Path, unplanted: str) -> Iterator[Path]:  # noqa: ARG001 - before anything is planted
    """Return the copy, from which everything planted is removed after the test."""
    yield tree
    for planted in [*(tree / "metagpu").rglob("planted*")]:
        shutil.rmtree(planted) if planted.is_dir() else planted.unlink()


def check_contracts(tree: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Check some contracts of a tree."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    chosen = [part for contract in contracts for part in ("--contract", contract)]
    return subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-c", code, "--no-logo", "--no-cache", *chosen],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_contract_is_tried() -> None:
    """This file tries each contract of `pyproject.toml`, and no other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]

    assert {contract["id"] for contract in contracts} == set(PLANTED)
    assert {contract["id"] for contract in contracts if contract.get("exhaustive")} == set(
        EXHAUSTIVE
    )


@pytest.mark.parametrize("contract", PLANTED)
def test_a_forbidden_import_is_refused(copy: Path, unplanted: str, contract: str) -> None:
    """The contract is kept as the tree is, and broken by one import that it forbids."""
    for file, line in PLANTED[contract].items():
        (copy / "metagpu" / file).write_text(f'"""Planted."""\n\n{line}\n', encoding="utf-8")
    broken = check_contracts(copy, contract)

    assert f"{len(PLANTED)} kept, 0 broken" in unplanted
    assert (broken.returncode, "0 kept, 1 broken" in broken.stdout) == (1, True), broken.stdout
    assert "planted" in broken.stdout


@pytest.mark.parametrize("contract", EXHAUSTIVE)
def test_a_package_that_no_layer_names_is_refused(copy: Path, contract: str) -> None:
    """A new package is refused until the contract of layers names it."""
    package = copy / "metagpu" / EXHAUSTIVE[contract]
    package.mkdir()
    (package / "__init__.py").write_text('"""Planted."""\n', encoding="utf-8")

    assert "planted" in (done := check_contracts(copy, contract)).stdout + done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize("line", PROGRAMS)
def test_every_way_of_starting_a_program_is_refused(line: str) -> None:
    """Ruff refuses every call that starts a program, in any file but one."""
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "check", "--select", "TID251", "--output-format", "concise"]

    def found(file: str) -> str:
        name = ["--stdin-filename", str(ROOT / "metagpu" / file), "-"]
        done = subprocess.run(  # noqa: S603 - our own command
            [*command, *name], input=line, cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout

    assert "TID251" in found("plugins/cluster/planted.py")
    assert "TID251" not in found("host/programs.py")
