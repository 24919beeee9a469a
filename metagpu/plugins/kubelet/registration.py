"""The client of the kubelet's Registration service, one connection for all.

All resources lose a kubelet at the same moment and register with the next kubelet at the same
moment. One connection each takes longer than the registrations of four resources.
"""

import anyio
import structlog
from grpclib.exceptions import GRPCError

from metagpu.core.errors import KubeletError, describe_error
from metagpu.core.runtime.rate_limit import Backoff
from metagpu.plugins.kubelet.directory import KubeletDirectory
from metagpu.plugins.kubelet.grpc_client import UnixChannel, call_alone
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
