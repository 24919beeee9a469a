"""One resource name at the kubelet: serve, register, and again after a loss.

All resources lose a kubelet at the same moment and register with the next kubelet at the same
moment. One connection each takes longer than the registrations of four resources.
"""

from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.exceptions import GRPCError, StreamTerminatedError

from metagpu.core.errors import KubeletError, describe_error
from metagpu.core.runtime.files import file_identity
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.core.state.call_stats import KubeletCallStats
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.grpc_client import UnixChannel, call_alone
from metagpu.plugins.kubelet.grpc_server import StreamingCalls, serve_grpc
from metagpu.plugins.kubelet.messages import build_register_request
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.plugins.kubelet.timing import TIMING, KubeletTiming

log = structlog.get_logger()


class RegistrationClient:
    """The connection to the kubelet, open while it is leased."""

    def __init__(self, directory: KubeletDirectory, timing: KubeletTiming = TIMING) -> None:
        self._directory = directory
        self._timing = timing
        self._channel: UnixChannel | None = None
        self._connecting = anyio.Lock()
        self._leases: set[RegistrationLease] = set()

    async def acquire(self) -> "RegistrationLease":
        """Wait for a kubelet that listens; return a lease of the connection, to be closed."""
        lease = RegistrationLease(self)
        self._leases.add(lease)

        try:
            async with self._connecting:
                await self._connect()
        except BaseException:
            lease.close()
            raise
        return lease

    async def _connect(self) -> None:
        """Connect, unless a connection is open."""
        timing, began, logged = self._timing, anyio.current_time(), False
        backoff = Backoff(timing.connect_delay, timing.longest_connect_delay)

        while True:
            kubelet = self._directory.kubelet_identity()
            channel = self._channel or UnixChannel(self._directory.kubelet_socket)
            self._channel = channel
            try:
                with anyio.fail_after(timing.connect_deadline):
                    await channel.connect()
            except OSError as error:
                if not logged and anyio.current_time() - began >= timing.absence:
                    logged = True
                    self._log_absence(error)
                if kubelet is None:
                    backoff.reset()
                    delay = timing.longest_connect_delay
                else:
                    delay = backoff.next()
                await self._directory.wait_kubelet_replaced(kubelet, delay)
            else:
                if logged:
                    log.info("kubelet found", socket=str(self._directory.kubelet_socket))
                return

    def _log_absence(self, error: OSError) -> None:
        log.warning(
            "no kubelet takes registrations",
            socket=str(self._directory.kubelet_socket),
            error=describe_error(error),
            fix="start the kubelet, or name its device-plugins folder with --kubelet-dir",
        )

    async def register(self, request: v1beta1.RegisterRequest) -> None:
        """Register once (see `RegistrationLease.register`)."""
        if self._channel is None:
            raise ConnectionError("the connection to the kubelet is closed")

        deadline = self._timing.register_deadline
        try:
            stub = v1beta1.RegistrationStub(self._channel)
            await call_alone(stub.register(request, timeout=deadline))
        except GRPCError as error:
            raise KubeletError(error.message or error.status.name) from error
        except TimeoutError as error:
            raise KubeletError(f"no answer within {deadline:g} s") from error
        except AssertionError as error:  # betterproto2's error for an answer without a message
            raise KubeletError("it answered without a message") from error

    def release(self, lease: "RegistrationLease") -> None:
        """Drop a lease; the last one closes the connection."""
        self._leases.discard(lease)
        if not self._leases and self._channel is not None:
            self._channel.close()
            self._channel = None


class RegistrationLease:
    """One resource's lease of the connection to the kubelet."""

    def __init__(self, client: RegistrationClient) -> None:
        self._client = client

    async def register(self, request: v1beta1.RegisterRequest) -> None:
        """Register once.

        Raises:
            KubeletError: the kubelet refuses, or does not answer.
            OSError: the connection breaks.
            StreamTerminatedError: likewise.
        """
        await self._client.register(request)

    def close(self) -> None:
        """Release the connection; a second call has no effect."""
        self._client.release(self)


_NVIDIA: Final = "nvidia.com/"
_GPU: Final = "nvidia.com/gpu"
_GKE: Final = "nvidiaGPU-*.sock"


async def find_competing_socket(directory: KubeletDirectory, resource: str) -> Path | None:
    """Return the socket of another plugin that serves a resource; `None` without one.

    A file without a listener, left behind by a plugin that ended, does not count. The kubelet keeps
    the plugin that registers last, and only ends the list of the other: two that register again
    each time would take the resource from each other for ever.
    """
    async for path in _candidates(directory, resource):
        if file_identity(path) is None:
            continue
        try:
            stream = await anyio.connect_unix(path)
        except OSError:
            continue
        await stream.aclose()
        return path
    return None


async def _candidates(directory: KubeletDirectory, resource: str) -> AsyncIterator[Path]:
    """Yield the paths at which other plugins would serve a resource.

    - NVIDIA's plugin, alone, in the GPU operator or in HAMi: `nvidia.com/NAME` on
      `nvidia-NAME.sock`.
    - GKE's plugin: `nvidia.com/gpu` on a socket named after the plugin's start time.
    - cnvrg's MetaGPU: any resource, on a socket named after the resource in base64.
    - another daemon of metagpu, of a version that does not lock the folder.
    """
    folder = directory.path
    if resource.startswith(_NVIDIA):
        yield folder / f"nvidia-{resource.removeprefix(_NVIDIA)}.sock"
    if resource == _GPU:
        async for path in anyio.Path(folder).glob(_GKE):
            yield Path(path)
    encoded = b64encode(resource.encode()).decode()
    if "/" not in encoded:  # no file name has a slash
        yield folder / encoded
    for other in await directory.find_sockets_of_others(resource):
        yield other


NO_KUBELET: Final = "a kubelet that takes registrations"
"""What an endpoint waits for without a kubelet, for as long as there is none."""


class Endpoint:
    """Keeps one service registered.

    Attributes:
        waits_for: what the present attempt to register waits for, in words.
        since: the event loop's time at which that wait began.
        problem: why the last attempt failed, empty where it did not.

    Args:
        service: answers the kubelet.
        directory: the kubelet's folder.
        client: registers with the kubelet.
        on_competitor: receives the socket of a competing plugin, `None` when there is none.
        record: counts the kubelet's restarts; one of its own unless given.
        timing: deadlines and delays.
    """

    def __init__(
        self,
        service: DevicePluginService,
        directory: KubeletDirectory,
        client: RegistrationClient,
        on_competitor: Callable[[Path | None], None] = lambda _: None,
        record: KubeletCallStats | None = None,
        *,
        timing: KubeletTiming = TIMING,
    ) -> None:
        self._service = service
        self._directory = directory
        self._client = client
        self._on_competitor = on_competitor
        self._record = record or KubeletCallStats()
        self._timing = timing
        self._backoff: Backoff | None = None
        self._attempt = anyio.CancelScope()
        self._log = log.bind(resource=service.resource)
        self.problem = ""
        self._wait_for("its first attempt")

    async def run(self) -> None:
        """Serve and register until cancelled; register again what the kubelet loses.

        Each registration has a new socket, created when a kubelet answers: a kubelet that starts
        wipes the folder before it listens, so the new socket stays. The old stream ends before the
        next registration: with both open, the end of the old stream would make the kubelet drop
        the new registration.
        """
        while True:
            with anyio.CancelScope() as self._attempt:
                await self._wait_for_competitor()
                self._service.encode_ahead()
                self._wait_for(NO_KUBELET)
                with closing(await self._client.acquire()) as lease:
                    kubelet = self._directory.kubelet_identity()
                    began = anyio.current_time()
                    problem = await self._register_once(lease, kubelet)
                await self._wait_retry(kubelet, anyio.current_time() - began, problem)

    def register_again(self, reason: str) -> None:
        """End the present registration, or attempt to register, and begin the next one."""
        self._log.warning("registering again", reason=reason)
        self._attempt.cancel()

    def _wait_for(self, what: str) -> None:
        self.waits_for, self.since = what, anyio.current_time()

    async def _wait_for_competitor(self) -> None:
        """Wait while another plugin serves this resource: two would compete for it."""
        reported: Path | None = None
        resource = self._service.resource
        self._wait_for("its look for another plugin of the name")

        while (competitor := await find_competing_socket(self._directory, resource)) is not None:
            if competitor != reported:
                reported = competitor
                self._on_competitor(competitor)
                fix = "stop the other plugin, or give our resource another name"
                self._log.error("competing device plugin found", socket=str(competitor), fix=fix)
            await self._directory.wait_changed()

        self._on_competitor(None)
        if reported is not None:
            self._log.info("competing device plugin gone")

    async def _register_once(
        self, lease: RegistrationLease, kubelet: tuple[int, int, int] | None
    ) -> Exception | None:
        """Serve, register and wait until the registration is lost; return why it failed."""
        path = self._directory.new_socket_path(self._service.resource)
        calls = StreamingCalls()

        if kubelet is not None:  # before it can ask for a share
            self._service.greet(kubelet)
        try:
            async with serve_grpc(path, self._service.methods(calls), calls, self._timing.linger):
                self._wait_for("the kubelet's answer to its registration")
                await self._register(lease, path)
                lease.close()
                self._record.record_kubelet(kubelet)
                await self._wait_lost(path, kubelet, calls)
        except KubeletError as error:
            self._log.warning("registration refused", error=str(error))
            return error
        except (OSError, StreamTerminatedError) as error:
            reason = describe_error(error)
            self._log.warning("registration failed", socket=str(path), error=reason)
            return error
        return None

    async def _wait_retry(
        self,
        kubelet: tuple[int, int, int] | None,
        lasted: float,
        problem: Exception | None,
    ) -> None:
        """Wait before the next registration; another kubelet ends the wait.

        After a registration that lasted, and after the first one that did not, there is no delay.
        """
        timing = self._timing
        if lasted >= timing.steady:
            self._backoff = None

        if self._backoff is None:
            delay, self._backoff = 0.0, Backoff(timing.failure_delay, timing.longest_delay)
        else:
            delay = self._backoff.next()
        if isinstance(problem, KubeletError) and delay < timing.refusal_delay:
            self._backoff = Backoff(timing.refusal_delay, timing.longest_delay)
            delay = self._backoff.next()

        self.problem = describe_error(problem) if problem else ""
        self._wait_for("its next attempt")
        await self._directory.wait_kubelet_replaced(kubelet, delay)
        if self._directory.kubelet_identity() != kubelet:
            self._backoff = None

    async def _register(self, lease: RegistrationLease, path: Path) -> None:
        """Register once (see `RegistrationLease.register`)."""
        service = self._service
        await lease.register(
            build_register_request(service.resource, path.name, pre_start=service.pre_start)
        )
        self._service.record.registrations += 1
        self._log.info("resource registered", socket=path.name)

    async def _wait_lost(
        self, path: Path, kubelet: tuple[int, int, int] | None, calls: StreamingCalls
    ) -> None:
        """Wait until this registration is lost.

        It is lost when our socket was removed, the kubelet has a new socket, or the list's stream
        ended, which the kubelet never opens again by itself.
        """
        self._wait_for("the kubelet to open its list")
        reason = ""

        async def lasts() -> None:
            nonlocal reason
            with anyio.move_on_after(self._timing.list_deadline) as waiting:
                await calls.wait_opened()
            if waiting.cancelled_caught:
                reason = "the kubelet did not open the list"
                return
            self._service.record.listed = True
            await calls.wait_ended()
            reason = "the kubelet closed the list"

        async def first(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        async def changed() -> None:
            # A socket file that is merely gone does no harm while the stream is open.
            while (
                self._directory.kubelet_identity() in (None, kubelet)
                and file_identity(path) is not None
            ):
                await self._directory.wait_changed()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(first, lasts)
                group.start_soon(first, changed)
        finally:
            self._service.record.listed = False

        if self._directory.kubelet_identity() not in (None, kubelet):
            reason = "there is a new kubelet"
        elif file_identity(path) is None:
            reason = "our socket was removed"
        self._log.info("registration lost", reason=reason)
