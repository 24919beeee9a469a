"""Address and credentials of the API server, and the program that a kubeconfig may name for them.

That program is started here and not by the library, which waits for it without end.
"""

import asyncio
import json
import os
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config
from kubernetes_asyncio.config.exec_provider import ExecProvider
from kubernetes_asyncio.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

DEADLINE: Final = 10.0
"""Seconds for the program, or for whoever else is asked: those of clouds take one to five."""

_OWN: Final = ("exec", "token", "tokenFile", "client-certificate", "client-key")
"""What a user of a kubeconfig may have that its program's answer takes the place of."""


async def credentials(kubeconfig: Path | None) -> Configuration:
    """Read address and credentials as they are now; `None` is for those that a pod is given.

    Raises:
        ConfigException: if there are none, or their program gives none in time.
        OSError: if a file cannot be read.
        yaml.YAMLError: if the file is none.
    """
    if kubeconfig is None:
        return await to_thread.run_sync(_of_the_pod)

    merged, user = await to_thread.run_sync(_parsed, kubeconfig)
    if not user.get("exec"):
        user.pop("exec", None)
        return await to_thread.run_sync(_configured, merged)
    program = ExecProvider(ConfigNode("exec", user["exec"]))
    said = _understood(program, await _printed(program))
    for key in _OWN:
        user.pop(key, None)
    user.update(said)
    return await to_thread.run_sync(_configured, merged)


def _of_the_pod() -> Configuration:
    configuration = Configuration()
    load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call] # it has no types
    return configuration


def _parsed(kubeconfig: Path) -> tuple[KubeConfigMerger, dict[str, Any]]:
    """Read a file; give it with the user of its context, which may be changed. Blocks."""
    if not kubeconfig.is_file():
        raise ConfigException("there is no such file")
    try:
        merged = KubeConfigMerger(str(kubeconfig))
        context = KubeConfigLoader(config_dict=merged.config, config_base_path=None).current_context
        name = context["context"].get("user") if context else None
        users = merged.config["users"] if merged.config else None
        found = users.get_with_name(name, safe=True) if users is not None and name else None
        user = found.value.get("user") if found is not None else None
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigException("it is no kubeconfig") from error
    return merged, user if isinstance(user, dict) else {}


def _configured(merged: KubeConfigMerger) -> Configuration:
    """Make of a kubeconfig what the library goes by; blocks, and may ask who gives tokens."""
    configuration = Configuration()
    loader = KubeConfigLoader(
        config_dict=merged.config, config_base_path=None, config_persister=merged.save_changes
    )
    try:
        asyncio.run(asyncio.wait_for(loader.load_and_set(configuration), DEADLINE))
    except TimeoutError:
        raise ConfigException(f"who gives its tokens did not answer in {DEADLINE:g} s") from None
    return configuration


async def _printed(program: ExecProvider) -> bytes:
    """Start a program and give what it prints; when time is up, it and what it started are ended.

    Raises:
        ConfigException: if it cannot be started, fails, or does not end in time.
    """
    info = {"apiVersion": program.api_version, "kind": "ExecCredential"}
    env = {
        **program.env,
        "KUBERNETES_EXEC_INFO": json.dumps({**info, "spec": {"interactive": False}}),
    }
    try:
        process = await anyio.open_process(program.args, env=env, start_new_session=True)
    except OSError as error:
        raise _failed(program, f"could not be started: {error.strerror}") from error

    printed, complaint = bytearray(), bytearray()
    async with process:
        try:
            with anyio.fail_after(DEADLINE):
                if process.stdin is not None:
                    await process.stdin.aclose()
                async with anyio.create_task_group() as group:
                    group.start_soon(_drain, process.stdout, printed)
                    group.start_soon(_drain, process.stderr, complaint)
                status = await process.wait()
        except TimeoutError:
            mend = "run it by hand to see what it waits for; it is tried again"
            raise _failed(program, f"did not end within {DEADLINE:g} s; {mend}") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, SIGKILL)

    if status:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise _failed(program, f"failed with status {status}: {last[0]}")
    return bytes(printed)


async def _drain(stream: ByteReceiveStream | None, into: bytearray) -> None:
    if stream is not None:
        async for part in stream:
            into += part


def _understood(program: ExecProvider, printed: bytes) -> Mapping[str, str]:
    """Give what a program's answer is in the words of a kubeconfig's user.

    Raises:
        ConfigException: if it is no ExecCredential of the version that was asked for.
    """
    try:
        answer = json.loads(printed)
        version, status = answer["apiVersion"], answer["status"]
        if version != program.api_version:
            raise _failed(program, f"answers {version}, and {program.api_version} was asked for")
        if "token" in status:
            return {"token": str(status["token"])}
        pair = str(status["clientCertificateData"]), str(status["clientKeyData"])
    except (ValueError, KeyError, TypeError) as error:
        why = f"printed no ExecCredential with a token, or a certificate and its key ({error!r})"
        raise _failed(program, why) from error
    keys = "client-certificate-data", "client-key-data"
    return {key: b64encode(it.encode()).decode() for key, it in zip(keys, pair, strict=True)}


def _failed(program: ExecProvider, why: str) -> ConfigException:
    """Say what went wrong with a program; not with which arguments, which may be secret."""
    return ConfigException(f"its program `{program.args[0]}` (exec) {why}")
