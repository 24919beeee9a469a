"""Address, certificates and credentials of the API server.

A kubeconfig may name a program that has them. metagpu starts it itself: the library waits for a
program without end.
"""

# ruff: noqa: E402 - the library is loaded without its models, and then imported

import asyncio
import json
import os
import ssl
from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml
from anyio import to_thread

from metagpu.core.contracts.programs import RunCommand
from metagpu.core.errors import ClusterError
from metagpu.core.runtime.files import file_identity
from metagpu.patches import load_kubernetes_client

load_kubernetes_client()

from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.config import ConfigException, load_incluster_config
from kubernetes_asyncio.config.exec_provider import ExecProvider
from kubernetes_asyncio.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

__all__ = [
    "ConfigException",
    "Configuration",
    "context_namespace",
    "load_credentials",
    "proxy_of",
    "tls_context",
]

_REPLACED: Final = ("exec", "token", "tokenFile", "client-certificate", "client-key")
"""Keys of a kubeconfig's user that the answer of its program replaces."""


async def load_credentials(
    kubeconfig: Path | None, run_command: RunCommand, deadline: float, context: str | None = None
) -> Configuration:
    """Load the present address and credentials.

    Args:
        kubeconfig: the file, or several as in `KUBECONFIG`; `None` loads the service account of
            the pod.
        run_command: starts the program that a kubeconfig may name.
        deadline: seconds for that program, or for another source of tokens.
        context: the context; `None` takes the file's current one.

    Raises:
        ConfigException: there are no credentials, or their program gives none in time.
        OSError: a file cannot be read.
        yaml.YAMLError: the file is no YAML.
    """
    if kubeconfig is None:
        return await to_thread.run_sync(_load_service_account)

    merged, user = await to_thread.run_sync(_parse, kubeconfig, context)
    if not user.get("exec"):
        user.pop("exec", None)
        return await to_thread.run_sync(_configure, merged, deadline, context)
    program = ExecProvider(ConfigNode("exec", user["exec"]))
    answer = _decode(program, await _run(program, run_command, deadline))
    for key in _REPLACED:
        user.pop(key, None)
    user.update(answer)
    return await to_thread.run_sync(_configure, merged, deadline, context)


def _new_configuration() -> Configuration:
    """Return a configuration that judges certificates as Kubernetes' own clients do.

    From 3.13 on Python also requires extensions of RFC 5280, such as the key usage of an
    authority, that the authorities of some clusters lack and no component in Go asks for.
    """
    configuration = Configuration()
    configuration.disable_strict_ssl_verification = True
    return configuration


def _load_service_account() -> Configuration:
    configuration = _new_configuration()
    load_incluster_config(configuration, try_refresh_token=False)  # type: ignore[no-untyped-call] # it has no types
    return configuration


def context_namespace(kubeconfig: Path, context: str | None = None) -> str:
    """Return the namespace of a context, `default` where it names none. Blocks.

    Raises:
        ClusterError: the file cannot be read, or has no such context.
    """
    try:
        merged = _merge(kubeconfig)
        found = _context(merged, context)
    except (ConfigException, AttributeError, KeyError, TypeError, OSError, yaml.YAMLError) as error:
        raise ClusterError(f"no context in {kubeconfig}: {error}") from error
    return str((found or {}).get("namespace") or "default")


def context_names(kubeconfig: Path) -> Iterable[str]:
    """Return the names of a file's contexts. Blocks.

    Raises:
        ConfigException: the file cannot be read, or has none.
    """
    merged: Any = _merge(kubeconfig).config
    return [context["name"] for context in merged["contexts"].value]


def _merge(kubeconfig: Path) -> KubeConfigMerger:
    parts = [Path(part) for part in str(kubeconfig).split(os.pathsep)]
    if not any(part.is_file() for part in parts):
        if any(part.exists() for part in parts):
            raise ConfigException(
                "it is not a regular file, and it has to be read more than once; write its text "
                "to a file"
            )
        raise ConfigException("there is no such file")
    return KubeConfigMerger(str(kubeconfig))


def _context(merged: KubeConfigMerger, name: str | None) -> Mapping[str, Any] | None:
    loader = KubeConfigLoader(config_dict=merged.config, config_base_path=None, active_context=name)
    context = loader.current_context
    found: Mapping[str, Any] | None = context["context"] if context else None
    return found


def _parse(kubeconfig: Path, context: str | None) -> tuple[KubeConfigMerger, dict[str, Any]]:
    """Read a file; return it with the mutable user of its context. Blocks."""
    try:
        merged = _merge(kubeconfig)
        chosen = _context(merged, context)
        name = chosen.get("user") if chosen else None
        users = merged.config["users"] if merged.config else None
        found = users.get_with_name(name, safe=True) if users is not None and name else None
        user = found.value.get("user") if found is not None else None
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigException("it is not a kubeconfig") from error
    return merged, user if isinstance(user, dict) else {}


def _configure(
    merged: KubeConfigMerger, deadline: float, context: str | None = None
) -> Configuration:
    """Convert a kubeconfig to the library's configuration; blocks.

    The library may request a token for it.
    """
    configuration = _new_configuration()
    loader = KubeConfigLoader(
        config_dict=merged.config,
        config_base_path=None,
        config_persister=merged.save_changes,
        active_context=context,
    )
    try:
        asyncio.run(asyncio.wait_for(loader.load_and_set(configuration), deadline))
    except TimeoutError:
        problem = f"the source of its tokens did not answer within {deadline:g} s"
        raise ConfigException(problem) from None
    return configuration


async def _run(program: ExecProvider, run_command: RunCommand, deadline: float) -> bytes:
    """Run a program and return its output.

    Raises:
        ConfigException: the program cannot be started, fails, or exceeds its deadline.
    """
    info = {"apiVersion": program.api_version, "kind": "ExecCredential"}
    env = {
        **program.env,
        "KUBERNETES_EXEC_INFO": json.dumps({**info, "spec": {"interactive": False}}),
    }
    try:
        done = await run_command(program.args, env=env, deadline=deadline)
    except TimeoutError:
        fix = "run it by hand to see why; metagpu tries again"
        raise _failure(program, f"did not end within {deadline:g} s; {fix}") from None
    except OSError as error:
        raise _failure(program, f"could not be started: {error.strerror}") from error

    if done.status:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise _failure(program, f"failed with status {done.status}: {last[0]}")
    return done.stdout


def _decode(program: ExecProvider, output: bytes) -> Mapping[str, str]:
    """Return the answer of a program as keys of a kubeconfig's user.

    Raises:
        ConfigException: the output is no ExecCredential of the requested version.
    """
    try:
        answer = json.loads(output)
        version, status = answer["apiVersion"], answer["status"]
        if version != program.api_version:
            raise _failure(program, f"answers {version}, and {program.api_version} was requested")
        if "token" in status:
            return {"token": str(status["token"])}
        pair = str(status["clientCertificateData"]), str(status["clientKeyData"])
    except (ValueError, KeyError, TypeError) as error:
        reason = f"printed no ExecCredential with a token, or a certificate and its key ({error!r})"
        raise _failure(program, reason) from error
    keys = "client-certificate-data", "client-key-data"
    return {key: b64encode(text.encode()).decode() for key, text in zip(keys, pair, strict=True)}


def _failure(program: ExecProvider, reason: str) -> ConfigException:
    """Return the error of a program, without its arguments, which may be secret."""
    return ConfigException(f"its program `{program.args[0]}` (exec) {reason}")


def tls_context(configuration: Configuration) -> ssl.SSLContext:
    """Return what judges the API server's certificate, and has ours. Blocks.

    Raises:
        OSError: a file cannot be read, or is no certificate.
    """
    authorities = configuration.ssl_ca_cert or ssl.get_default_verify_paths().cafile
    files = authorities, configuration.cert_file, configuration.key_file
    return _tls_context(
        *(configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file),
        tuple(file_identity(Path(file)) if file else None for file in files),
        verify=configuration.verify_ssl,
        strict=not configuration.disable_strict_ssl_verification,
    )


@lru_cache(maxsize=1)
def _tls_context(
    authorities: str | None,
    certificate: str | None,
    key: str | None,
    identities: object,  # noqa: ARG001 - of these files: other files have another context
    *,
    verify: bool,
    strict: bool,
) -> ssl.SSLContext:
    """Return the context of some files, which takes a megabyte and 26 ms.

    Each failed request loads the credentials again, and mostly finds the same files.
    """
    context = ssl.create_default_context(cafile=authorities)
    if certificate:
        context.load_cert_chain(certificate, keyfile=key)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if not strict:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def proxy_of(configuration: Configuration) -> str | None:
    """Return the proxy that the kubeconfig names, or the environment. Blocks.

    On some systems the name of the host is looked up.
    """
    if configuration.proxy:
        return str(configuration.proxy)
    address = urlsplit(str(configuration.host))
    if address.hostname is None or proxy_bypass(address.hostname):
        return None
    return getproxies().get(address.scheme)
