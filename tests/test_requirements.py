"""Needs of a checkout: locks that are complete, hashed and of one mind; a built mgctl."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.rigs.mgctl import NOT_BUILT, is_built

REPOSITORY = Path(__file__).parents[1]
PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)", re.MULTILINE)
LOCKS = ("run", "package", "build", "docs", "dev")
MEND = "run `make locks`"


def pins(lock: str) -> dict[str, str]:
    """Return the version of each package in a lock."""
    text = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
    return {canonicalize_name(other["name"]): other["version"] for other in PINNED.finditer(text)}


def wanted() -> dict[str, list[Requirement]]:
    """Return what each lock must satisfy: pyproject.toml and requirements/package.in."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    run = [Requirement(dependency) for dependency in project["dependencies"]]
    extras = {
        name: [Requirement(item) for item in items if not item.startswith("metagpu[")]
        for name, items in project["optional-dependencies"].items()
    }
    lines = (REPOSITORY / "requirements" / "package.in").read_text().splitlines()
    package = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        "run": run,
        "package": package,
        "build": [*run, *package, *extras["build"]],
        "docs": [*run, *extras.pop("docs")],
        "dev": [
            *run,
            *package,
            *(requirement for items in extras.values() for requirement in items),
        ],
    }


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_satisfies_what_the_project_asks_for(lock: str) -> None:
    """Every requirement is in its lock, at a version within its bounds."""
    pinned = pins(lock)
    for requirement in wanted()[lock]:
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in {lock}.lock: {MEND}"
        assert version in requirement.specifier, f"{requirement} but {version} is locked: {MEND}"


@pytest.mark.parametrize("lock", LOCKS)
def test_everything_in_a_lock_has_hashes(lock: str) -> None:
    """A package without a hash would be whatever the index serves under its version."""
    text = (REPOSITORY / "requirements" / f"{lock}.lock").read_text()
    entries = re.split(r"\n(?=[A-Za-z0-9])", text)
    named = [entry for entry in entries if PINNED.match(entry)]
    assert len(named) == len(pins(lock))
    assert [entry for entry in named if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("lock", [lock for lock in LOCKS if lock != "dev"])
def test_what_is_shipped_is_what_was_tested(lock: str) -> None:
    """Every lock has the versions of dev.lock, with which the tests run; one venv holds all."""
    tested, locked = pins("dev"), pins(lock)
    alone = locked.keys() - tested.keys()

    assert {name: tested[name] for name in locked.keys() - alone} == {
        name: version for name, version in locked.items() if name not in alone
    }
    assert not alone or lock == "docs"


def test_the_compiler_has_one_version() -> None:
    """The compiler's version is no range: what it builds is mounted into every pod."""
    (compiler,) = (
        requirement for requirement in wanted()["build"] if requirement.name == "ziglang"
    )
    assert str(compiler.specifier).startswith("==")


def test_mgctl_is_built() -> None:
    """A checkout without `mgctl` of containers fails here alone; tests that need it are skipped."""
    assert is_built(), NOT_BUILT
