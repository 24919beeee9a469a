"""A running webhook, its certificates by openssl, and a client as the API server is one."""

import asyncio
import base64
import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import anyio
from anyio import to_thread

from metagpu.plugins.http.address import ListenAddress
from metagpu.translation.node_offers import NodeGroups
from metagpu.translation.values import NodeOffer, TranslationSettings
from metagpu.webhook.connection import PATH
from metagpu.webhook.program import ReviewStats
from metagpu.webhook.server import ReviewServer, ServingCertificate
from metagpu.webhook.settings import WebhookLimits, WebhookTiming
from metagpu.webhook.translator import Translator

NAME: Final = "metagpu-webhook.kube-system.svc"
A100: Final = NodeOffer(
    "gpu-1",
    {
        "nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB",
        "nvidia.com/gpu.memory": "40960",
        "nvidia.com/gpu.count": "2",
        "metagpu.io/cnvrg.io_metagpu.backend": "fraction",
        "metagpu.io/cnvrg.io_metagpu.memory": "409",
        "metagpu.io/cnvrg.io_metagpu.replicas": "100",
        "metagpu.io/cnvrg.io_metagpu.gpus": "2",
    },
    {"cnvrg.io/metagpu": 200},
)
"""A node of two GPUs with 100 shares of 409 MiB each."""
LOOPBACK: Final = ListenAddress("127.0.0.1", 0)
QUICK: Final = WebhookTiming(handshake=60, request=60.0, drain=0.0)


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path) -> None:
        self.certificate = folder / "ca.crt"
        self._key = folder / "ca.key"
        self._config = folder / "openssl.cnf"
        self._config.write_text("[req]\ndistinguished_name = dn\n[dn]\n")
        self._make(
            "/CN=authority",
            self._key,
            self.certificate,
            "basicConstraints=critical,CA:TRUE",
            "keyUsage=critical,keyCertSign",
        )

    def issue(self, folder: Path, *, name: str = f"DNS:{NAME}", days: int = 7) -> None:
        """Write `tls.crt` and `tls.key` for a name, expired with a negative number of days."""
        folder.mkdir(exist_ok=True)
        request, certificate = folder / "tls.csr", folder / "tls.crt"
        self._make("/CN=webhook", folder / "tls.key", request)
        extensions = folder / "extensions"
        extensions.write_text(f"subjectAltName={name}\nextendedKeyUsage=serverAuth\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key),
            *("-CAcreateserial", "-days", days, "-extfile", extensions, "-out", certificate),
        )

    def _make(self, subject: str, key: Path, out: Path, *extensions: str) -> None:
        signing = ("-x509", "-days", "7") if extensions else ()
        added = [part for extension in extensions for part in ("-addext", extension)]
        _openssl(
            *("req", "-config", self._config, *signing, "-subj", subject, "-noenc"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-keyout", key, "-out", out, *added),
        )


def _openssl(*arguments: object) -> None:
    done = subprocess.run(  # noqa: S603 - our own arguments
        ["openssl", *map(str, arguments)],  # noqa: S607 - that of the system
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def pod(limits: Mapping[str, str], **annotations: str) -> dict[str, Any]:
    """Return a pod with one container, as the API server sends it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "train",
            "namespace": "team-a",
            "labels": {"app": "train"},
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": {
            "containers": [
                {
                    "name": "main",
                    "image": "cuda",
                    "resources": {"limits": dict(limits), "requests": dict(limits)},
                }
            ],
            "schedulerName": "default-scheduler",
        },
    }


def review(pod: object, *, uid: str = "1", dry_run: bool = False, **request: Any) -> bytes:  # noqa: ANN401 - any field
    """Return the AdmissionReview of a pod's creation."""
    return json.dumps(
        {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": uid,
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "operation": "CREATE",
                "namespace": "team-a",
                "userInfo": {"username": "somebody"},
                "object": pod,
                "oldObject": None,
                "dryRun": dry_run,
                **request,
            },
        }
    ).encode()


def patched(pod: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod after the patch of a response."""
    found: dict[str, Any] = json.loads(json.dumps(pod))
    for load in json.loads(base64.b64decode(response.get("patch", "W10="))):
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in load["path"].split("/")[1:]
        ]
        at: Any = found
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if load["op"] == "remove":
            del at[last]
        elif isinstance(at, list):
            at.append(load["value"]) if last == "-" else at.insert(int(last), load["value"])
        else:
            at[last] = load["value"]
    return found


@dataclass
class FixedNodes:
    """Nodes that a test names."""

    groups: NodeGroups = field(default_factory=lambda: NodeGroups([A100]))
    known: bool = True
    version: int = 0


class RawClient:
    """A connection of which a test decides every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def write(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    async def send(self, body: bytes, *, announced: int | None = None) -> None:
        """Send a request with a body, or with the first part of the announced one."""
        length = len(body) if announced is None else announced
        head = f"POST {PATH} HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {length}\r\n\r\n"
        await self.write(head.encode() + body)

    send_more = write

    async def status(self) -> int:
        """Read an answer; return its status."""
        with anyio.fail_after(30):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            await self._reader.readexactly(int(length[1]) if length else 0)
        return int(head.split()[1])

    async def ended(self) -> bool:
        """Wait for the end of the connection; return whether it came before any answer."""
        with anyio.fail_after(30):
            try:
                return not await self._reader.read()
            except ConnectionError:
                return True

    def pause(self) -> None:
        """Read no more bytes."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()


@dataclass
class RunningWebhook:
    """A webhook that serves, and its API server's side."""

    server: ReviewServer
    certificate: ServingCertificate
    nodes: FixedNodes
    stats: ReviewStats
    session: aiohttp.ClientSession
    trust: ssl.SSLContext
    serving: anyio.CancelScope
    raw: list[RawClient] = field(default_factory=list)

    async def connect(self, *, tls: bool = True, source: str = "127.0.0.1") -> RawClient:
        """Open a connection from an address, which ends with the webhook."""
        options: dict[str, Any] = {"ssl": self.trust, "server_hostname": NAME} if tls else {}
        options["local_addr"] = source, 0
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.server.port, **options))
        self.raw.append(client)
        return client

    async def post(self, body: bytes, path: str = PATH) -> tuple[int, bytes]:
        """Send a body; return status and answer."""
        url = f"https://127.0.0.1:{self.server.port}{path}"
        async with self.session.post(
            url, data=body, ssl=self.trust, server_hostname=NAME
        ) as response:
            return response.status, await response.read()

    async def review(self, body: bytes) -> dict[str, Any]:
        """Send an AdmissionReview; return its response."""
        status, answer = await self.post(body)
        assert status == 200, answer
        found: dict[str, Any] = json.loads(answer)
        assert found["apiVersion"] == "admission.k8s.io/v1"
        assert found["kind"] == "AdmissionReview"
        response: dict[str, Any] = found["response"]
        return response


@asynccontextmanager
async def webhook_at_work(
    folder: Path,
    authority: Authority,
    settings: TranslationSettings = TranslationSettings(),  # noqa: B008 - frozen
    timing: WebhookTiming = QUICK,
    limits: WebhookLimits = WebhookLimits(),  # noqa: B008 - frozen
) -> AsyncIterator[RunningWebhook]:
    """Run the server of reviews with a certificate in a folder, until the block ends."""
    nodes, stats = FixedNodes(), ReviewStats()
    certificate = ServingCertificate(folder)
    await certificate.reload()
    server = ReviewServer(
        LOOPBACK,
        certificate.context,
        Translator(nodes, settings).answer,
        record=stats.record,
        timing=timing,
        limits=limits,
    )
    trust = await to_thread.run_sync(
        lambda: ssl.create_default_context(cafile=str(authority.certificate))
    )
    serving = anyio.CancelScope()

    async def serve() -> None:
        with serving:
            await server.run()

    async with anyio.create_task_group() as group, aiohttp.ClientSession() as session:
        group.start_soon(certificate.run)
        group.start_soon(serve)
        with anyio.fail_after(30):
            while not server.port:
                await anyio.wait_all_tasks_blocked()
        webhook = RunningWebhook(server, certificate, nodes, stats, session, trust, serving)
        try:
            yield webhook
        finally:
            for client in webhook.raw:
                client.close()
        group.cancel_scope.cancel()  # not after a failure, which a cancellation would hide
