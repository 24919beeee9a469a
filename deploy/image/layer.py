"""The layer of metagpu: packages of run.lock, metagpu's wheel, programs, modules and licences.

The layer has an environment in /opt/metagpu, whose interpreter is /usr/local/bin/python3.13 of the
base. Nothing runs in the image: a machine of any processor lays the layer for any other.
"""

import configparser
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from metagpu import __version__

REPOSITORY = Path(__file__).parents[2]
PYTHON = "3.13"
"""The base's Python: bases, wheels and modules belong to this one version."""
ENVIRONMENT = "opt/metagpu"
PACKAGES = f"{ENVIRONMENT}/lib/python{PYTHON}/site-packages"
DOCUMENTS = "usr/share/doc/metagpu"

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""The image format's name of the processor -> the kernel's name."""

_SETTINGS = f"home = /usr/local/bin\ninclude-system-site-packages = false\nversion = {PYTHON}\n"
_PROGRAM = """\
#!/{environment}/bin/python3 -I
import sys
from {module} import {function}
sys.exit({function}())
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python of the version in the image, which runs on this machine."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def current(cls) -> "Interpreter":
        """Return the Python of this process.

        Raises:
            SystemExit: the image has another version.
        """
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        if version != PYTHON:
            raise SystemExit(f"this is Python {version}, and the image has {PYTHON}")
        return cls((sys.executable,))

    def compile(self, root: Path, folder: str) -> None:
        """Compile all modules in a folder of an image whose root is ROOT.

        A start compares no module with its source (PEP 552), so the times of files have no effect.
        """
        once = ("-q", "-f", "--invalidation-mode=unchecked-hash")
        run(
            *(*self.command, "-S", "-m", "compileall", *once),
            *("-s", root, "-p", "/", root / folder),
            PYTHONHASHSEED="0",  # the order of sets in modules
            **self.environment,
        )


def lay(root: Path, architecture: str, interpreter: Interpreter) -> None:
    """Fill the empty folder ROOT with the layer."""
    packages, documents = root / PACKAGES, root / DOCUMENTS
    install(packages, architecture)
    _write_programs(root, packages)
    interpreter.compile(root, PACKAGES)
    documents.mkdir(parents=True)
    shutil.copy(REPOSITORY / "LICENSE", documents)
    write_inventory(packages, documents)


def write_inventory(packages: Path, folder: Path) -> None:
    """Write the list of installed packages and their licences."""
    run(sys.executable, REPOSITORY / "requirements" / "sbom.py", packages, folder)


def install(packages: Path, architecture: str) -> None:
    """Install what run.lock names, by hash, and a wheel of this repository."""
    machine = MACHINES[architecture]
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    target = (
        *("install", f"--target={packages}", "--no-deps", "--no-compile", "--only-binary=:all:"),
        *(f"--platform=manylinux{name}_{machine}" for name in ("2014", "_2_17", "_2_28")),
        f"--python-version={PYTHON}",
    )
    run(*pip, *target, "--require-hashes", "-r", "requirements/run.lock")
    with TemporaryDirectory() as wheels:
        run(*pip, "wheel", "--no-build-isolation", "--no-deps", f"--wheel-dir={wheels}", ".")
        run(*pip, *target, "--no-index", f"--find-links={wheels}", f"metagpu=={__version__}")
    if not all(
        (packages / "metagpu" / "programs" / f"mgctl-{other}").exists()
        for other in MACHINES.values()
    ):
        raise SystemExit("the mgctl of containers is not built: run `make mgctl`")
    # Programs of libraries, pages for `man`, which the image lacks, stubs and modules of
    # cel-expr-python that nothing imports (38 MB), and files that kubernetes-asyncio drops beside
    # all packages.
    for folder in ("bin", "share", "bazel-project", "cel_expr_python/ext"):
        shutil.rmtree(packages / folder, ignore_errors=True)
    for stray in packages.glob("*.md"):
        stray.unlink()
    for record in packages.glob("*.dist-info/RECORD"):
        _correct_record(record, packages)


def _correct_record(record: Path, packages: Path) -> None:
    """Remove from a package's list of files what is not in the layer.

    A program that pip wrote has the builder's Python in its first line, and the list its digest.
    """
    lines = record.read_text().splitlines(keepends=True)
    present = (line for line in lines if (packages / next(csv.reader([line]))[0]).exists())
    record.write_text("".join(present))


def _write_programs(root: Path, packages: Path) -> None:
    """Write the environment's interpreter and metagpu's programs, as its wheel declares them."""
    programs, path = root / ENVIRONMENT / "bin", root / "usr" / "local" / "bin"
    for folder in (programs, path):
        folder.mkdir(parents=True)
    (root / ENVIRONMENT / "pyvenv.cfg").write_text(_SETTINGS)
    (programs / "python3").symlink_to(f"/usr/local/bin/python{PYTHON}")
    declared = configparser.ConfigParser()
    declared.read(packages / f"metagpu-{__version__}.dist-info" / "entry_points.txt")
    for name, entry in declared["console_scripts"].items():
        module, _, function = entry.partition(":")
        text = _PROGRAM.format(environment=ENVIRONMENT, module=module, function=function)
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
        (path / name).symlink_to(f"/{ENVIRONMENT}/bin/{name}")


def run(*command: str | Path, **environment: str) -> str:
    """Run a program in the repository; return its output.

    Raises:
        SystemExit: the program failed; the text has its last lines.
    """
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY), "LC_ALL": "C"} | environment
    done = subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(
            f"`{' '.join(map(str, command))}` failed:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout
