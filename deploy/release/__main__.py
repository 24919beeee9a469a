"""Write a release: python -m deploy.release [--registry ADDRESS].

The folder dist/vVERSION then has what a person uploads. The programs of mgctl/ and the manual pages
have to be there; `make release` sees to it.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.image.__main__ import write_archive
from deploy.image.layer import MACHINES, REPOSITORY, run
from deploy.release import documents, images, plugin
from metagpu import __version__


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Provide an empty folder, which takes the target's place when the block has succeeded."""
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free and not (target / documents.SUMS).is_file():
        raise SystemExit(f"{target} is not a release: name another folder by --target")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        new = Path(folder) / "new"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(Path(folder) / "old")
        new.rename(target)


def write(
    target: Path,
    notes: documents.Changelog,
    registry: str,
    built: Mapping[str, Path],
    commit: str,
) -> None:
    """Fill an empty folder with the files of a release.

    Args:
        target: the folder.
        notes: the section of the changelog.
        registry: where the images will be, as `registry.example.com/team`; empty is nowhere yet.
        built: archives of `make image` by processor; those that are absent are built.
        commit: the commit of the sources.
    """
    moment = int(os.environ["SOURCE_DATE_EPOCH"])
    name = f"{registry or 'docker.io/library'}/metagpu:{__version__}"
    with tempfile.TemporaryDirectory(prefix="metagpu-release-") as folder:
        work = Path(folder)
        archives = {}
        for architecture in sorted(MACHINES):
            archives[architecture] = built.get(architecture, work / f"{architecture}.tar")
            if architecture not in built:
                write_archive(archives[architecture], architecture)
        image = images.write(
            target / f"metagpu-{__version__}-images.oci.tar", name, archives, moment
        )
        packages = {key: images.debian_packages(path) for key, path in archives.items()}
        for file in ("sbom.cdx.json", "licenses.md"):
            text = images.read(archives["amd64"], f"usr/share/doc/metagpu/{file}")
            (target / f"metagpu-{__version__}-{file}").write_bytes(text)
        options = ("-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", target)
        run(sys.executable, *options)
        plugin.write(target, work / "plugin", moment)
    documents.write_chart(target, registry, notes, moment)
    notes.write(target / "RELEASE-NOTES.md")
    documents.write_provenance(target, image, registry, commit, packages)
    documents.write_checksums(target)


def main() -> None:
    """Read the arguments, and write the release."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("--registry", default="", help="where the images will be pulled from")
    parser.add_argument(
        "--target",
        type=lambda text: Path(text).resolve(),
        default=REPOSITORY / "dist" / f"v{__version__}",
        metavar="DIR",
        help="the folder to write, new, empty or of a release, which is replaced "
        f"(default: dist/v{__version__})",
    )
    parser.add_argument(
        "--images", type=Path, help="a folder with archives amd64.tar and arm64.tar, for tests"
    )
    parser.add_argument(
        "--rehearsal",
        action="store_true",
        help="take changes that are not committed, or not of this version, for tests",
    )
    given = parser.parse_args()
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        raise SystemExit("a release is made from a clone: it names its commit")
    if (changed := run("git", "status", "--porcelain").splitlines()) and not given.rehearsal:
        raise SystemExit(f"a release is a commit; not committed: {', '.join(changed)[:300]}")
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = documents.Changelog.read(text, rehearsal=given.rehearsal)
    commit = run("git", "rev-parse", "HEAD").strip()
    os.environ.setdefault("REVISION", commit)
    os.environ.setdefault("SOURCE_DATE_EPOCH", run("git", "log", "-1", "--format=%ct").strip())
    built = {path.stem: path for path in given.images.glob("*.tar")} if given.images else {}
    with replacing(given.target) as folder:
        write(folder, notes, given.registry.rstrip("/"), built, commit)
    for path in sorted(given.target.iterdir()):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path}")


if __name__ == "__main__":
    main()
