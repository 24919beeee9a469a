"""Reviews of 200 pods at once by the admission webhook, while a Node changes."""

import itertools
import selectors
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
from anyio import to_thread

from bench import daemon, machine
from bench.figures import Figure, Samples
from bench.plan import Plan
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.webhook.connection import PATH
from tests.webhook.rig import A100, NAME, Authority, pod, review

AT_ONCE: Final = 200
TARGET: Final = 50
"""Milliseconds of the p99."""
_KINDS: Final = 4
_CHANGE: Final = 0.02
"""Seconds between two changes of a Node's free shares."""
_TIMEOUT: Final = 60.0
_SERIAL: Final = itertools.count()


class _Webhook(NamedTuple):
    pid: int
    port: int
    trust: ssl.SSLContext


def reviews(plan: Plan) -> list[Figure]:
    """Send 200 reviews at once, of equal and of other pods, with 3 and with 1000 nodes."""
    return anyio.run(_reviews, plan)


async def _reviews(plan: Plan) -> list[Figure]:
    figures: list[Figure] = []
    for nodes in (3, 1000):
        with daemon.folder() as folder:
            api = SimApiServer()
            for number in range(nodes):
                _add_node(api, number)
            async with api.running(), _serving(api, folder) as webhook:
                figures += await _measure(plan, api, webhook, nodes)
    return figures


async def _measure(
    plan: Plan, api: SimApiServer, webhook: _Webhook, nodes: int
) -> Sequence[Figure]:
    rounds = plan.count(20, 1)
    figures: list[Figure] = []
    cases: dict[str, Callable[[int], dict[str, Any]]] = {
        "equal": lambda _: _pod(8000),
        "distinct": lambda number: _pod(1000 + number),
        "selective": lambda number: _pod(1000 + number, nodeSelector={"kind": "0"}),
    }
    for name, make in cases.items():
        row = f"{AT_ONCE} {name} reviews at once, {nodes} nodes"
        plan.report(f"reviews: {row}")
        samples = Samples()
        with ExitStack() as stack:
            clients = await to_thread.run_sync(_connect, webhook, stack)
            before = machine.cpu_seconds(webhook.pid)
            async with _changing(api, nodes):
                for each in range(rounds + 1):
                    requests = [_request(make(AT_ONCE * each + n)) for n in range(AT_ONCE)]
                    took = await to_thread.run_sync(_burst, clients, requests)
                    samples.seconds += took if each else ()  # the first one warms up
            spent = machine.cpu_seconds(webhook.pid) - before
        target = None if name == "selective" else TARGET
        figures += [samples.figure(row), samples.tail(f"{row}: p99", target=target)]
        figures.append(
            Figure(
                name=f"{row}: CPU of each",
                unit="us",
                measured=1e6 * spent / (rounds + 1) / AT_ONCE,
                target=None,
                calls=(rounds + 1) * AT_ONCE,
            )
        )
    return figures


def _pod(memory: int, **spec: object) -> dict[str, Any]:
    """Return a pod of 5 kB, as the API server sends one."""
    one = pod({"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory)}, team="a")
    [container] = one["spec"]["containers"]
    container["env"] = [{"name": f"VARIABLE_{n}", "value": "x" * 40} for n in range(50)]
    volumes = [{"name": f"volume-{n}", "emptyDir": {}} for n in range(10)]
    one["spec"] |= {"volumes": volumes, **spec}
    one["metadata"]["name"] = f"train-{next(_SERIAL)}"
    return one


# --- nodes ----------------------------------------------------------------------------------------


def _labels(number: int) -> dict[str, str]:
    """Return the labels of a node: there are some models, and 30 labels of others."""
    kind = number % _KINDS
    return {
        **A100.labels,
        "nvidia.com/gpu.product": f"NVIDIA-A100-{kind}",
        "kubernetes.io/hostname": f"gpu-{number}",
        "kind": str(kind),
        **{f"example.com/label-{n}": f"{number}" for n in range(30)},
    }


def _add_node(api: SimApiServer, number: int) -> None:
    api.add_node(f"gpu-{number}", _labels(number))
    _report(api, number, 200 - number % 150)


def _report(api: SimApiServer, number: int, free: int) -> None:
    api.report(f"gpu-{number}", {"cnvrg.io/metagpu": 200}, {"cnvrg.io/metagpu": free})


@asynccontextmanager
async def _changing(api: SimApiServer, nodes: int) -> AsyncIterator[None]:
    """Change the free shares of Nodes, one after the other, until the block ends."""

    async def change() -> None:
        for number in itertools.count():
            _report(api, number % nodes, 50 + 37 * number % 150)
            await anyio.sleep(_CHANGE)

    async with anyio.create_task_group() as group:
        group.start_soon(change)
        yield
        group.cancel_scope.cancel()


# --- the webhook ----------------------------------------------------------------------------------


@asynccontextmanager
async def _serving(api: SimApiServer, folder: Path) -> AsyncIterator[_Webhook]:
    """Run a webhook that has read all Nodes, in its own process."""
    authority = Authority(folder)
    authority.issue(folder / "tls")
    port, metrics = daemon.free_port(), daemon.free_port()
    options = {
        "--address": f"127.0.0.1:{port}",
        "--certificate": folder / "tls",
        "--kubeconfig": api.kubeconfig(folder),
        "--metrics": f"127.0.0.1:{metrics}",
    }
    process = _start([str(value) for pair in options.items() for value in pair], folder / "log")
    try:
        with anyio.fail_after(_TIMEOUT):
            while not await to_thread.run_sync(_ready, metrics):  # noqa: ASYNC110 - another process
                await anyio.sleep(0.05)
        trust = ssl.create_default_context(cafile=str(authority.certificate))
        yield _Webhook(process.pid, port, trust)
    finally:
        process.kill()
        process.wait()


def _start(arguments: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "metagpu", "webhook", *arguments]
    with log.open("wb") as file:
        return subprocess.Popen(command, cwd=daemon.HERE, stdout=file, stderr=file)


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:  # no answer, or another one
        return False


# --- the client -----------------------------------------------------------------------------------


def _connect(webhook: _Webhook, stack: ExitStack) -> list[ssl.SSLSocket]:
    """Open the connections that an API server keeps."""
    found = []
    for _ in range(AT_ONCE):
        plain = socket.create_connection(("127.0.0.1", webhook.port), timeout=_TIMEOUT)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.append(stack.enter_context(webhook.trust.wrap_socket(plain, server_hostname=NAME)))
    return found


def _request(one: dict[str, Any]) -> bytes:
    body = review(one)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {NAME}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _burst(clients: Sequence[ssl.SSLSocket], requests: Sequence[bytes]) -> list[float]:
    """Send a request on each connection at once; return the seconds to each whole answer."""
    began: dict[ssl.SSLSocket, float] = {}
    answers = dict.fromkeys(clients, b"")
    took: list[float] = []
    with selectors.DefaultSelector() as selector:
        for client, request in zip(clients, requests, strict=True):
            selector.register(client, selectors.EVENT_READ)
            began[client] = time.perf_counter()
            client.sendall(request)
        while selector.get_map():
            for key, _ in selector.select(_TIMEOUT):
                reading = key.fileobj
                assert isinstance(reading, ssl.SSLSocket)
                answers[reading] += reading.recv(65536)
                if _whole(answers[reading]):
                    took.append(time.perf_counter() - began[reading])
                    selector.unregister(reading)
    for answer in answers.values():
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:500]
        assert b'"patch"' in answer, answer[-500:]
    return took


def _whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    length = next(
        part for part in head.split(b"\r\n") if part.lower().startswith(b"content-length:")
    )
    return len(body) == int(length.split(b":")[1])
