"""Build Go programs from their modules into the cache."""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.rig.errors import MissingError, RigError
from tests.e2e.rig.go_programs import GoPrograms

OLDEST_GO = (1, 26)
HEARTBEAT_S = 30.0


def find_go() -> str | None:
    """Return a Go new enough for the pinned modules, from PATH or the usual folders."""
    paths = [shutil.which("go"), "/usr/local/go/bin/go"]
    paths += sorted(map(str, Path("/usr/lib").glob("go-*/bin/go")), reverse=True)
    for place in paths:
        if place and os.access(place, os.X_OK) and _go_version(place) >= OLDEST_GO:
            return place
    return None


def _go_version(go: str) -> tuple[int, int]:
    answer = subprocess.run([go, "version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"go(\d+)\.(\d+)", answer)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def missing_go_hint() -> str:
    """Return the line for a user without Go."""
    oldest = ".".join(map(str, OLDEST_GO))
    return (
        f"go {oldest} or newer: unpack the Go project's release into /usr/local/go, "
        "or put your own `go` on PATH (Kubernetes is built from source)"
    )


def build_programs(programs: GoPrograms) -> None:
    """Fill the folder of PROGRAMS, or leave it as it was: there is no half-built state.

    Raises:
        MissingError: no Go can build them.
        RigError: a build failed; the text is the compiler's.
    """
    target = programs.folder
    if not programs.missing():
        return
    go = find_go()
    if go is None:
        raise MissingError([missing_go_hint()])
    target.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(target.with_name(f"{target.name}.lock")):
        if not programs.missing():
            return  # another run built it while this one waited
        fresh = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        try:
            for program in programs.programs:
                _build(go, programs, program, fresh)
            _copy_files(go, programs, fresh)
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def build_command(go: str, programs: GoPrograms, package: str, output: Path) -> list[str]:
    """Return the command that builds a package."""
    version = programs.version
    major, minor, _ = version.split(".", 2)
    stamps = [stamp.format(version=version, major=major, minor=minor) for stamp in programs.stamps]
    flags = " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in stamps)])
    command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", flags]
    return [*command, "-tags", ",".join(programs.tags), "-o", str(output), package]


def build_settings(programs: GoPrograms) -> dict[str, str]:
    """Return the environment of a build; the machine's own GOFLAGS and go.work have no effect."""
    return {"CGO_ENABLED": str(int(programs.cgo)), "GOFLAGS": "-mod=readonly", "GOWORK": "off"}


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(go: str, programs: GoPrograms, program: str, folder: Path) -> None:
    command = build_command(go, programs, programs.programs[program], folder / program)
    started = time.monotonic()
    print(f"building {program} {programs.version} ...", flush=True)
    with tempfile.TemporaryFile("w+") as output:
        build = subprocess.Popen(
            command,
            cwd=programs.source,
            env=os.environ | build_settings(programs),
            stdout=output,
            stderr=output,
        )
        try:
            _wait_for_build(build, program, started)
        finally:
            build.kill()
            build.wait()
        if build.returncode != 0:
            output.seek(0)
            raise RigError(f"building {program} failed:\n{output.read()[-4000:]}")
    print(f"built {program} in {time.monotonic() - started:.0f} s", flush=True)


def _copy_files(go: str, programs: GoPrograms, folder: Path) -> None:
    command = [go, "list", "-m", "-f", "{{.Dir}}", programs.module]
    env = os.environ | build_settings(programs)
    module = Path(subprocess.check_output(command, cwd=programs.source, env=env, text=True).strip())
    for file in programs.files:
        source, target = module / file, folder / Path(file).name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def _wait_for_build(build: subprocess.Popen[bytes], program: str, started: float) -> None:
    while True:
        try:
            build.wait(timeout=HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - started
            print(f"  still building {program}, {seconds:.0f} s so far", flush=True)
        else:
            return
