"""`kubectl metagpu` as one file, and krew's description of it.

The file is a zip that Python runs. It has the modules of metagpu that the plugin imports, and the
libraries of run.lock that these import. Of them msgspec alone cannot do without a compiled part:
the file has it for every processor and every Python, and `bootstrap` takes the right one.
"""

import ast
import hashlib
import io
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import yaml

from deploy.image.layer import REPOSITORY, run
from deploy.release.documents import addresses, sha256, tar_gz
from metagpu import __version__

PROGRAM: Final = "kubectl-metagpu"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS: Final = {
    "x86_64-manylinux_2_17": "x86_64",
    "aarch64-manylinux_2_17": "aarch64",
    "x86_64-unknown-linux-musl": "x86_64",
    "aarch64-unknown-linux-musl": "aarch64",
    "x86_64-apple-darwin": "x86_64",
    "aarch64-apple-darwin": "arm64",
}
"""uv's name of a platform -> the kernel's name of its processor."""
LIBRARIES: Final = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "anyio", "attrs", "certifi", "frozenlist"),
    *("h11", "idna", "kubernetes-asyncio", "msgspec", "multidict", "propcache", "python-dateutil"),
    *("pyyaml", "six", "structlog", "typing-extensions", "urllib3", "yarl"),
)
"""The packages of run.lock that modules of the plugin import, with those that these need."""
_UNUSED: Final = ("kubernetes_asyncio/client/api", "kubernetes_asyncio/client/models")
"""Folders that `metagpu.patches` does not load: 36 of 42 MB."""
_COMPILED: Final = "msgspec"


def write(target: Path, work: Path, moment: int) -> None:
    """Write the program, krew's archive of it and krew's manifest."""
    content = pack(gather(work), moment)
    program = target / PROGRAM
    program.write_bytes(content)
    program.chmod(0o755)
    archive = target / f"{PROGRAM}-{__version__}.tar.gz"
    files = {PROGRAM: (content, 0o755), "LICENSE": ((REPOSITORY / "LICENSE").read_bytes(), 0o644)}
    archive.write_bytes(tar_gz(files, moment))
    (target / "metagpu.yaml").write_text(manifest(archive))


def gather(work: Path) -> Mapping[str, bytes]:
    """Return the content of the program, by its paths; `work` is a folder for downloads."""
    work.mkdir(parents=True)
    libraries = _install(LIBRARIES, work / "libraries", next(iter(PLATFORMS)), PYTHONS[0])
    found = {f"lib/{name}": content for name, content in _modules(libraries)}
    for platform, machine in PLATFORMS.items():
        for python in PYTHONS:
            folder = _install([_COMPILED], work / f"{platform}-{python}", platform, python)
            for file in folder.rglob("*.so"):
                found[f"native/{machine}/{file.relative_to(folder)}"] = file.read_bytes()
    for file in closure("metagpu.kubectl.program"):
        found[f"lib/{file.relative_to(REPOSITORY)}"] = file.read_bytes()
    for file in (REPOSITORY / "metagpu" / "plugins" / "web" / "assets").iterdir():
        found[f"lib/{file.relative_to(REPOSITORY)}"] = file.read_bytes()
    found["__main__.py"] = Path(__file__).with_name("bootstrap.py").read_bytes()
    return found


def pack(content: Mapping[str, bytes], moment: int) -> bytes:
    """Return a zip that the first python3 in PATH runs; its digest names what was unpacked."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    buffer = io.BytesIO()
    # A zip knows no time before 1980.
    time = max(datetime.fromtimestamp(moment, UTC), datetime(1980, 1, 1, tzinfo=UTC))
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted({**content, "digest": digest.hexdigest().encode()}.items()):
            entry = zipfile.ZipInfo(name, time.timetuple()[:6])
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return b"#!/usr/bin/env python3\n" + buffer.getvalue()


def closure(module: str) -> Iterator[Path]:
    """Yield the files of a module of metagpu and of all modules of metagpu that it imports."""
    wanted, seen = [module], set[Path]()
    while wanted:
        path = REPOSITORY / wanted.pop().replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file() or file in seen:
            continue
        seen.add(file)
        yield file
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
            for name in names:
                parts = name.split(".")
                if parts[0] == "metagpu":
                    wanted += [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def lock_of(names: Sequence[str]) -> str:
    """Return the lines of run.lock about some packages.

    Raises:
        SystemExit: the lock lacks one.
    """
    text = (REPOSITORY / "requirements" / "run.lock").read_text(encoding="utf-8")
    entries = {}
    for entry in text.replace("\\\n", " ").splitlines():
        if "==" in entry and not entry.startswith("#"):
            # Conditions are of the machine that builds; the file is for all.
            requirement, _, hashes = entry.partition(" --hash")
            entries[entry.partition("==")[0]] = f"{requirement.split(';')[0]} --hash{hashes}"
    if missing := set(names) - entries.keys():
        raise SystemExit(f"requirements/run.lock lacks {', '.join(sorted(missing))}")
    return "\n".join(entries[name] for name in names)


def manifest(archive: Path) -> str:
    """Return krew's manifest, by the documented fields of its plugins.

    Without addresses it has the archive's name in place of its address, which krew does not use
    with `--archive`.
    """
    everywhere = [
        {"key": "os", "operator": "In", "values": ["darwin", "linux"]},
        {"key": "arch", "operator": "In", "values": ["amd64", "arm64"]},
    ]
    urls = addresses()
    platform = {
        "selector": {"matchExpressions": everywhere},
        "uri": f"{urls['Releases']}/v{__version__}/{archive.name}" if urls else archive.name,
        "sha256": sha256(archive),
        "files": [{"from": PROGRAM, "to": "."}, {"from": "LICENSE", "to": "."}],
        "bin": PROGRAM,
    }
    document = {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "metagpu"},
        "spec": {
            "version": f"v{__version__}",
            **({"homepage": urls["Homepage"]} if urls else {}),
            "shortDescription": "Show who holds which GPU, and why a pod gets none",
            "description": "Shows the GPUs of a cluster that metagpu shares between pods: load, "
            "holders, faults, why a pod waits, and where a manifest would fit. It cordons and "
            "drains single GPUs, and serves a page on your own machine.\n",
            "caveats": "Needs Python 3.11 to 3.14 as python3, and metagpu in the cluster. Readers "
            "need the ClusterRole metagpu-viewer.\n",
            "platforms": [platform],
        },
    }
    return yaml.safe_dump(document, sort_keys=False, width=100)


def _install(packages: Sequence[str], folder: Path, platform: str, python: str) -> Path:
    """Install packages of run.lock into a folder, for a platform and a Python; return it."""
    locked = folder.with_suffix(".txt")
    locked.write_text(lock_of(packages))
    uv = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes")
    chosen = ("--only-binary=:all:", f"--python-platform={platform}", f"--python-version={python}")
    run(*uv, *chosen, f"--target={folder}", "--requirements", locked)
    return folder


def _modules(packages: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of packages that need no compiler: modules, data and licences."""
    for folder in _UNUSED:
        shutil.rmtree(packages / folder)
    for file in sorted(packages.rglob("*")):
        inside = file.relative_to(packages)
        stray = len(inside.parts) == 1 and file.suffix != ".py"  # of several packages: whose?
        if file.is_file() and not stray and inside.parts[0] != "bin":
            is_source = file.suffix in (".so", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".hash")
            if not is_source and file.name not in ("RECORD", "WHEEL", "INSTALLER", "REQUESTED"):
                yield str(inside), file.read_bytes()
