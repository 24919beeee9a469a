"""Credentials that a program gives, as a kubeconfig names it: real programs, a simulated server."""

import os
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import anyio
import pytest
import yaml
from kubernetes_asyncio.config import ConfigException

from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster import credentials as room
from metagpu.plugins.cluster.client import connected
from metagpu.plugins.cluster.credentials import credentials
from metagpu.sim.apiserver import SimApiServer
from tests.mig_rig import until

NODES = "/api/v1/nodes"
VERSION = "client.authentication.k8s.io/v1"


def kubeconfig(
    folder: Path,
    script: str,
    server: SimApiServer | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a kubeconfig whose user is whoever a shell script says, with other keys beside it."""
    program = folder / "plugin"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    path = (server or SimApiServer()).kubeconfig(folder)
    content = yaml.safe_load(path.read_text())
    if server is None:
        content["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    user = {"exec": {"command": str(program), "apiVersion": VERSION}, **beside}
    content["users"][0]["user"] = user
    path.write_text(yaml.safe_dump(content))
    return path


def printing(status: str) -> str:
    """Write a script that prints an answer."""
    head = f'"apiVersion": "{VERSION}", "kind": "ExecCredential"'
    return f"echo '{{{head}, \"status\": {status}}}'"


async def test_a_programs_token_is_used_and_asked_for_anew(tmp_path: Path) -> None:
    """The program says the token; when it is accepted no more, the program is asked again."""
    server = SimApiServer()
    async with server.running():
        (tmp_path / "token").write_text(server.token)
        script = f'printf %s "$KUBERNETES_EXEC_INFO" > {tmp_path}/info\n' + printing(
            f'{{"token": "\'$(cat {tmp_path}/token)\'"}}'
        )
        async with connected(kubeconfig(tmp_path, script, server)) as client:
            await client.call("GET", NODES)
            server.token = "second"  # noqa: S105 - it guards nothing
            (tmp_path / "token").write_text(server.token)
            await client.call("GET", NODES)

    info = yaml.safe_load((tmp_path / "info").read_text())
    assert info == {"apiVersion": VERSION, "kind": "ExecCredential", "spec": {"interactive": False}}


async def test_a_programs_certificate_is_used(tmp_path: Path) -> None:
    """A certificate and its key are used in the place of what else the user has."""
    status = '{"clientCertificateData": "certificate", "clientKeyData": "key"}'
    old = b64encode(b"old").decode()
    path = kubeconfig(tmp_path, printing(status), beside={"client-certificate-data": old})
    found = await credentials(path)

    assert found.host == "https://127.0.0.1:1"
    assert await anyio.Path(found.cert_file or "").read_text() == "certificate"
    assert await anyio.Path(found.key_file or "").read_text() == "key"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo a reason >&2; exit 3", "failed with status 3: a reason"),
        ("exit 4", "failed with status 4: it said nothing"),
        ("echo {", "printed no ExecCredential with a token, or a certificate and its key"),
        (printing("{}"), "printed no ExecCredential with a token, or a certificate and its key"),
        (
            printing('{"token": "x"}').replace("io/v1", "io/v1beta1"),
            f"answers {VERSION}beta1, and {VERSION} was asked for",
        ),
    ],
)
async def test_a_program_that_gives_none_is_told(tmp_path: Path, script: str, why: str) -> None:
    """Its name and what went wrong are said, in one line that names the file too."""
    path = kubeconfig(tmp_path, script)
    async with connected(path) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    told = f"no credentials in {path}: its program `{tmp_path}/plugin` (exec) {why}"
    assert str(refusal.value).startswith(told)


async def test_a_program_that_is_missing_is_told(tmp_path: Path) -> None:
    """A program that cannot be started is named, with the reason."""
    path = kubeconfig(tmp_path, "")
    (tmp_path / "plugin").unlink()
    with pytest.raises(ConfigException, match="could not be started: No such file or directory"):
        await credentials(path)


async def test_a_program_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its deadline it is ended with what it started; all who waited are told, none retries.

    The next request asks it again.
    """
    monkeypatch.setattr(room, "DEADLINE", 1.0)
    script = f"echo $$ >> {tmp_path}/pids\nsleep 3600 &\necho $! >> {tmp_path}/pids\nwait"
    path = kubeconfig(tmp_path, script)
    problems: list[str] = []

    async with connected(path) as client:

        async def ask() -> None:
            with pytest.raises(ClusterError) as refusal:
                await client.call("GET", NODES)
            problems.append(str(refusal.value))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
        await ask()

    told = (
        f"no credentials in {path}: its program `{tmp_path}/plugin` (exec) did not end within "
        "1 s; run it by hand to see what it waits for; it is tried again"
    )
    assert problems == [told] * 6
    noted = tmp_path / "pids"
    noted.touch()  # on a machine that is too busy the script did not come to it
    pids = [int(line) for line in noted.read_text().split()]
    assert len(pids) <= 4  # two for each time that it was started
    await until(lambda: not any(map(_runs, pids)))


async def test_who_is_cancelled_leaves_no_program(tmp_path: Path) -> None:
    """A daemon that ends waits for no program that hangs, and leaves none behind."""
    script = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 3600"
    path = kubeconfig(tmp_path, script)

    async with anyio.create_task_group() as group:
        group.start_soon(credentials, path)
        await until((tmp_path / "pid").exists)
        group.cancel_scope.cancel()
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    """Tell whether a process is there and has not ended, if only nobody has asked how."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
