"""Credentials of an exec plugin in a kubeconfig: real programs, a simulated server."""

import asyncio
import gc
import os
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import anyio.abc
import pytest
import yaml
from kubernetes_asyncio.config import ConfigException
from kubernetes_asyncio.config.kube_config import KubeConfigLoader

from metagpu.core.errors import ClusterError
from metagpu.host.programs import run_command
from metagpu.plugins.cluster.credentials import (
    context_names,
    context_namespace,
    load_credentials,
)
from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.sim.apiserver.server import SimApiServer
from tests.plugins.cluster.rig import open_client_at
from tests.rigs.mig import until

NODES = "/api/v1/nodes"
VERSION = "client.authentication.k8s.io/v1"
DEADLINE = 10.0


def kubeconfig(
    folder: Path,
    script: str,
    server: SimApiServer | None = None,
    beside: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write a kubeconfig whose user comes from a shell script, with other keys beside it."""
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


async def test_a_programs_token_is_used_and_renewed(tmp_path: Path) -> None:
    """A program's token is used; when it is refused, the program runs again."""
    server = SimApiServer()
    async with server.running():
        (tmp_path / "token").write_text(server.token)
        script = f'printf %s "$KUBERNETES_EXEC_INFO" > {tmp_path}/info\n' + printing(
            f'{{"token": "\'$(cat {tmp_path}/token)\'"}}'
        )
        async with open_client_at(kubeconfig(tmp_path, script, server)) as client:
            await client.call("GET", NODES)
            server.token = "second"  # noqa: S105 - it guards nothing
            (tmp_path / "token").write_text(server.token)
            await client.call("GET", NODES)

    info = yaml.safe_load((tmp_path / "info").read_text())
    assert info == {"apiVersion": VERSION, "kind": "ExecCredential", "spec": {"interactive": False}}


async def test_a_programs_certificate_is_used(tmp_path: Path) -> None:
    """A program's certificate and key replace the user's other credentials."""
    status = '{"clientCertificateData": "certificate", "clientKeyData": "key"}'
    old = b64encode(b"old").decode()
    path = kubeconfig(tmp_path, printing(status), beside={"client-certificate-data": old})
    found = await load_credentials(path, run_command, DEADLINE)

    assert found.host == "https://127.0.0.1:1"
    assert await anyio.Path(found.cert_file or "").read_text() == "certificate"
    assert await anyio.Path(found.key_file or "").read_text() == "key"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo a reason >&2; exit 3", "failed with status 3: a reason"),
        ("exit 4", "failed with status 4: no output"),
        ("echo {", "printed no ExecCredential with a token, or a certificate and its key"),
        (printing("{}"), "printed no ExecCredential with a token, or a certificate and its key"),
        (
            printing('{"token": "x"}').replace("io/v1", "io/v1beta1"),
            f"answers {VERSION}beta1, and {VERSION} was requested",
        ),
    ],
)
async def test_a_program_that_gives_none_is_reported(tmp_path: Path, script: str, why: str) -> None:
    """One line names the program, its mistake and the file."""
    path = kubeconfig(tmp_path, script)
    async with open_client_at(path) as client:
        with pytest.raises(ClusterError) as refusal:
            await client.call("GET", NODES)
    message = f"no credentials in {path}: its program `{tmp_path}/plugin` (exec) {why}"
    assert str(refusal.value).startswith(message)


async def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    """The error names a program that cannot be started, with the reason."""
    path = kubeconfig(tmp_path, "")
    (tmp_path / "plugin").unlink()
    with pytest.raises(ConfigException, match="could not be started: No such file or directory"):
        await load_credentials(path, run_command, DEADLINE)


async def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    """At its timeout the program and its children end; all waiting requests fail once.

    The next request asks it again.
    """
    script = f"echo $$ >> {tmp_path}/pids\nsleep 3600 &\necho $! >> {tmp_path}/pids\nwait"
    path = kubeconfig(tmp_path, script)
    problems: list[str] = []

    async with open_client_at(path, ClusterTiming(credentials_timeout=1.0)) as client:

        async def ask() -> None:
            with pytest.raises(ClusterError) as refusal:
                await client.call("GET", NODES)
            problems.append(str(refusal.value))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(ask)
        await ask()

    message = (
        f"no credentials in {path}: its program `{tmp_path}/plugin` (exec) did not end within "
        "1 s; run it by hand to see why; metagpu tries again"
    )
    assert problems == [message] * 6
    noted = tmp_path / "pids"
    noted.touch()  # on a machine that is too busy the script did not come to it
    pids = [int(line) for line in noted.read_text().split()]
    assert len(pids) <= 4  # two for each time that it was started
    await until(lambda: not any(map(_runs, pids)))


async def test_a_cancelled_request_leaves_no_program(tmp_path: Path) -> None:
    """A cancelled request ends its hanging program."""
    script = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; sleep 3600"
    path = kubeconfig(tmp_path, script)

    async with anyio.create_task_group() as group:
        group.start_soon(load_credentials, path, run_command, DEADLINE)
        await until((tmp_path / "pid").exists)
        group.cancel_scope.cancel()
    pid = int((tmp_path / "pid").read_text())
    await until(lambda: not _runs(pid))


async def test_a_request_cancelled_in_a_start_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A starting program is ended whole, and its pipes are closed."""
    started: list[int] = []
    start = anyio.open_process

    async def cancelled(*args: Any, **more: Any) -> anyio.abc.Process:  # noqa: ANN401 - as it is called
        group.cancel_scope.cancel()
        process = await start(*args, **more)
        started.append(process.pid)
        return process

    monkeypatch.setattr(anyio, "open_process", cancelled)
    path = kubeconfig(tmp_path, "sleep 3600")
    async with anyio.create_task_group() as group:
        group.start_soon(load_credentials, path, run_command, DEADLINE)

    [pid] = started
    await until(lambda: not _runs(pid))
    gc.collect()  # a pipe that is open still is a warning, and that fails


def _runs(pid: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_a_programs_answer_replaces_all_other_credentials(tmp_path: Path) -> None:
    """A token or a certificate beside the program is not used in its place."""
    certificate = '{"clientCertificateData": "certificate", "clientKeyData": "key"}'
    beside = {"token": "old", "client-certificate": "/none", "client-key": "/none"}
    path = kubeconfig(tmp_path, printing(certificate), beside=beside)
    found = await load_credentials(path, run_command, DEADLINE)
    assert "BearerToken" not in found.api_key
    assert await anyio.Path(found.cert_file or "").read_text() == "certificate"


async def test_a_program_has_the_environment_of_its_entry(tmp_path: Path) -> None:
    """Names and values of `exec.env` are the program's, beside those of the daemon."""
    path = kubeconfig(tmp_path, printing('{"token": "\'"$PROFILE:${HOME:+home}"\'"}'))
    content = yaml.safe_load(path.read_text())
    content["users"][0]["user"]["exec"]["env"] = [{"name": "PROFILE", "value": "gpus"}]
    path.write_text(yaml.safe_dump(content))
    found = await load_credentials(path, run_command, DEADLINE)
    assert found.api_key["BearerToken"] == "Bearer gpus:home"


async def test_a_program_of_no_name_is_none(tmp_path: Path) -> None:
    """`exec: null` leaves the token of the entry."""
    path = SimApiServer().kubeconfig(tmp_path)
    content = yaml.safe_load(path.read_text())
    content["users"][0]["user"]["exec"] = None
    path.write_text(yaml.safe_dump(content))
    found = await load_credentials(path, run_command, DEADLINE)
    assert found.api_key["BearerToken"] == "Bearer first"


def test_a_context_has_a_namespace(tmp_path: Path) -> None:
    """The namespace is the context's, `default` without one; several files are one."""
    path = SimApiServer().kubeconfig(tmp_path)
    other = tmp_path / "other"
    context = {"name": "a", "context": {"cluster": "sim", "user": "sim", "namespace": "team"}}
    other.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "contexts": [context]}))
    both = Path(f"{path}:{other}")
    assert (context_namespace(both), context_namespace(both, "a")) == ("default", "team")
    assert sorted(context_names(both)) == ["a", "sim"]
    with pytest.raises(ClusterError, match="no context in"):
        context_namespace(path, "a")


async def test_a_source_of_tokens_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library may ask a provider of identities, which does not answer."""

    async def hang(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(KubeConfigLoader, "load_and_set", hang)
    path = SimApiServer().kubeconfig(tmp_path)
    with pytest.raises(ConfigException, match=r"tokens did not answer within 0\.05 s"):
        await load_credentials(path, run_command, 0.05)
