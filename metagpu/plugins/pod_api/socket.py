"""The socket that containers call: callers known by the kernel, limits by pod.

A caller's load costs the caller alone: a process of its own takes the callers in turns by pod, a
request has little time and space, a pod has few connections, and a caller that does not read is
dropped.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from metagpu.core.contracts.host import Container, Host
from metagpu.core.contracts.programs import RunChild
from metagpu.core.errors import MetagpuError
from metagpu.core.grants.injection import POD_SOCKET_NAME
from metagpu.core.runtime.listener import SO_PASSRIGHTS
from metagpu.core.runtime.rate_limit import Backoff, TokenBucket
from metagpu.plugins.pod_api import frames
from metagpu.plugins.pod_api.calls import RelayedCall, RelayFailed, RelaySettings, relayed_calls
from metagpu.plugins.pod_api.command import wants_json
from metagpu.plugins.pod_api.frames import PodRequest

log = structlog.get_logger()


class PodSocketLimits(msgspec.Struct, frozen=True):
    """The limits of callers.

    Attributes:
        pod_connections: open at once, of one pod.
        pod_burst: requests that one pod may make at once.
        pod_requests: requests of one pod a second.
        request_time: seconds that a caller has for its request.
        reading_time: seconds that a caller has for each part of its answer.
        accept_burst: connections accepted at once.
        accepted: connections accepted a second, of all pods, by the relay; the others wait in the
            kernel, at no cost.
        call_burst: calls identified at once.
        calls: calls identified a second, of all pods, in turns by pod.
        pod_calls: calls of one pod that the daemon has at once; more than `pod_connections`, so
            that some are refused with the reason. Its others wait for their turn.
        remembered_pods: pods whose requests are counted, before silent ones are forgotten.
        passrights: the socket option SO_PASSRIGHTS; another number leaves it alone.
    """

    pod_connections: int = 4
    pod_burst: int = 20
    pod_requests: float = 5.0
    request_time: float = 2.0
    reading_time: float = 5.0
    accept_burst: int = 1000
    accepted: float = 4000.0
    call_burst: int = 50
    calls: float = 200.0
    pod_calls: int = 8
    remembered_pods: int = 256
    passrights: int = SO_PASSRIGHTS


class PodApiTiming(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        silence: without a sign of life, after which the relay is killed and started again.
        beat: between two signs of life.
        first_delay, longest_delay: between the end of a relay and its next start.
        switch_period: between two looks at whether the configuration has `mgctl` in pods.
    """

    silence: float = 10.0
    beat: float = 1.0
    first_delay: float = 0.1
    longest_delay: float = 10.0
    switch_period: float = 1.0


DEFAULT_LIMITS: Final = PodSocketLimits()


class CallerRefused(MetagpuError):
    """Raised when a container gets no answer; the text is for the caller."""


class CallerConnection(msgspec.Struct):
    """One caller's connection: its standard output and error output.

    Attributes:
        reading_time: seconds that the caller has to read more of its answer.
        wants_json: whether an error is an object with its reason, in place of a text.
    """

    connection: socket.socket
    reading_time: float
    wants_json: bool = False

    async def write_stdout(self, text: str) -> None:
        """Write text to the caller's standard output."""
        await self.send(frames.stdout_frame(text))

    async def write_stderr(self, text: str) -> None:
        """Write a line to the caller's error output."""
        await self.send(frames.stderr_frame(f"mgctl: {text}\n"))

    async def write_failure(self, error: MetagpuError) -> None:
        """Write the line about an error that ends the call."""
        if not self.wants_json:
            await self.write_stderr(str(error))
            return
        described = json.dumps({"reason": error.reason, "error": str(error)})
        await self.send(frames.stderr_frame(f"{described}\n"))

    async def send(self, data: bytes) -> None:
        """Send bytes within the time that the caller has.

        Raises:
            TimeoutError: the caller does not read.
            OSError: the caller has gone.
        """
        with anyio.fail_after(self.reading_time):
            await asyncio.get_running_loop().sock_sendall(self.connection, data)


RequestHandler = Callable[[Container, PodRequest, CallerConnection], Awaitable[int]]
"""Answers a container's request; returns the exit status."""


class _PodUsage(msgspec.Struct):
    """The open connections and the recent requests of one pod."""

    requests: TokenBucket
    connections: int = 0


class PodSocket:
    """Serves the folder's socket.

    Attributes:
        problem: why no caller is answered now; empty while callers are.

    Args:
        folder: the folder that containers see.
        host: identifies callers.
        run_child: starts the relay.
        respond: answers requests.
        limits: of callers.
        timing: of the relay.
        proc: where the kernel shows processes, to the relay.
    """

    def __init__(
        self,
        folder: Path,
        host: Host,
        run_child: RunChild,
        respond: RequestHandler,
        *,
        limits: PodSocketLimits = DEFAULT_LIMITS,
        timing: PodApiTiming = PodApiTiming(),  # noqa: B008 - frozen
        proc: Path = Path("/proc"),
    ) -> None:
        self.problem = ""
        self._path = folder / POD_SOCKET_NAME
        self._host = host
        self._run_child = run_child
        self._respond = respond
        self._limits = limits
        self._timing = timing
        self._proc = proc
        self._pods: dict[str, _PodUsage] = {}

    async def run(self) -> None:
        """Answer until cancelled; a relay that fails is started again."""
        timing, clock = self._timing, asyncio.get_running_loop().time
        backoff = Backoff(timing.first_delay, timing.longest_delay)

        while True:
            began = clock()
            try:
                await self._serve()
            except RelayFailed as error:
                if clock() - began > timing.longest_delay:
                    backoff.reset()
                delay, self.problem = backoff.next(), str(error)
                log.warning("mgctl relay failed", error=self.problem, retry=f"{delay:g}s")
                await anyio.sleep(delay)

    async def _serve(self) -> None:
        """Answer until the relay fails.

        Raises:
            RelayFailed: why.
        """
        async with relayed_calls(
            self._path,
            self._relay_settings(),
            self._run_child,
            silence=self._timing.silence,
            proc=self._proc,
        ) as calls:
            self.problem = ""
            async with anyio.create_task_group() as group:
                try:
                    async for call in calls:
                        group.start_soon(self._serve_call, call)
                except RelayFailed as error:
                    failure = error
                    group.cancel_scope.cancel()
        raise failure

    def _relay_settings(self) -> RelaySettings:
        limits = self._limits
        return RelaySettings(
            request_limit=frames.LENGTH.size + frames.REQUEST_LIMIT,
            reading_time=limits.reading_time,
            accept_burst=limits.accept_burst,
            accepted=limits.accepted,
            call_burst=limits.call_burst,
            calls=limits.calls,
            pod_calls=limits.pod_calls,
            beat=self._timing.beat,
            passrights=limits.passrights,
        )

    async def _serve_call(self, call: RelayedCall) -> None:
        """Answer one caller; a failure ends this call alone."""
        caller = CallerConnection(call.connection, self._limits.reading_time)

        with closing(call):
            try:
                try:
                    # Read first: a refusal too has the form that the caller asks for.
                    request = await _read_request(call.connection, self._limits.request_time)
                    caller.wants_json = wants_json(request.arguments)
                    status = await self._answer(caller, await self._identify(call), request)
                except MetagpuError as error:
                    await caller.write_failure(error)
                    status = 1
                await caller.send(frames.exit_frame(status))
            except (OSError, TimeoutError, EOFError):
                pass  # the caller has gone, or does not read
            except Exception:
                log.exception("container request failed")

    async def _answer(
        self, caller: CallerConnection, container: Container, request: PodRequest
    ) -> int:
        limits, pod = self._limits, self._usage(container.pod_uid)
        if pod.connections >= limits.pod_connections:
            raise CallerRefused(
                f"this pod has {limits.pod_connections} calls open already; end one of them"
            )
        pod.connections += 1

        try:
            if not pod.requests.take(asyncio.get_running_loop().time()):
                raise CallerRefused(
                    f"this pod asks too often: {limits.pod_requests:g} requests a second are "
                    "answered; `-w` looks again by itself"
                )
            return await self._respond_while_connected(container, request, caller)
        finally:
            pod.connections -= 1

    async def _respond_while_connected(
        self, container: Container, request: PodRequest, caller: CallerConnection
    ) -> int:
        """Answer until done, or until the caller hangs up or sends more than its request.

        Raises:
            EOFError: the caller hung up.
        """
        status: int | None = None
        failure: Exception | None = None

        async def watch_hang_up(scope: anyio.CancelScope) -> None:
            with suppress(OSError):
                await asyncio.get_running_loop().sock_recv(caller.connection, 1)
            scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch_hang_up, group.cancel_scope)
            try:
                status = await self._respond(container, request, caller)
            except Exception as error:  # noqa: BLE001 - raised below, outside of the group
                failure = error
            group.cancel_scope.cancel()

        if failure is not None:
            raise failure
        if status is None:
            raise EOFError
        return status

    async def _identify(self, call: RelayedCall) -> Container:
        """Return the container that calls.

        Raises:
            CallerRefused: the caller runs in no pod, or the daemon cannot see its process.
        """
        identity = await self._host.peer(call.peer) if call.peer else None
        if identity is None:
            raise CallerRefused(
                "metagpu cannot see who asks, so it answers nothing: its pod needs "
                "`hostPID: true` to know the containers of this node"
            )
        if identity.container is None:
            raise CallerRefused(
                "this socket answers containers of pods alone; on the node, root asks with "
                "metagpu's own mgctl"
            )
        return identity.container

    def _usage(self, pod: str) -> _PodUsage:
        limits, now = self._limits, asyncio.get_running_loop().time()
        if len(self._pods) >= limits.remembered_pods:
            self._pods = {
                uid: usage
                for uid, usage in self._pods.items()
                if usage.connections or not usage.requests.is_full(now)
            }
        return self._pods.setdefault(
            pod, _PodUsage(TokenBucket(limits.pod_burst, limits.pod_requests))
        )


async def _read_request(connection: socket.socket, deadline: float) -> PodRequest:
    """Read a request within `deadline` seconds.

    Raises:
        CallerRefused: the request takes longer.
        MalformedRequest: the bytes are no request.
        EOFError: the caller hangs up.
    """
    try:
        with anyio.fail_after(deadline):
            size = frames.parse_length(await _read(connection, frames.LENGTH.size))
            return frames.parse_request(await _read(connection, size))
    except TimeoutError:
        raise CallerRefused(f"no request came within {deadline:g} s") from None


async def _read(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data
