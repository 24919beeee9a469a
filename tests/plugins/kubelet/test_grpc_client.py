"""Calls to the kubelet: what is left of a call whose connection is lost."""

import asyncio
import socket
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from grpclib.exceptions import StreamTerminatedError

from metagpu.plugins.kubelet.grpc_client import call_alone, call_raw
from metagpu.plugins.kubelet.pb import v1beta1
from metagpu.sim.kubelet.registration import RegistrationService
from tests.plugins.kubelet.rig import FOUR_RESOURCES, RESOURCES, gpu, node


async def test_kubelet_dies_in_a_registration_and_the_resource_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration that dies with its kubelet leaves no trace: removing it ends no other one."""
    gone, *kept = RESOURCES
    waits = anyio.Event()
    register = RegistrationService.register

    async def never_answers_the_first(
        self: RegistrationService, message: v1beta1.RegisterRequest
    ) -> v1beta1.Empty:
        if message.resource_name == gone and not waits.is_set():
            waits.set()
            await anyio.sleep_forever()
        return await register(self, message)

    monkeypatch.setattr(RegistrationService, "register", never_answers_the_first)

    gpus = [gpu(n) for n in range(4)]
    async with (
        node(tmp_path, *gpus, config=FOUR_RESOURCES) as live_node,
        live_node.kubelet.running(),
    ):
        await waits.wait()
        await live_node.kubelet.restart()
        for resource in RESOURCES:
            await live_node.until(100, 100, resource)

        live_node.offer(FOUR_RESOURCES.replace(gone, "example.com/other"))
        for resource in ("example.com/other", *kept):
            await live_node.until(100, 100, resource)
        await live_node.kubelet.wait_for(lambda: live_node.kubelet.open_streams[gone] == 0)
        await live_node.kubelet.restart()

        for resource in ("example.com/other", *kept):
            await live_node.until(100, 100, resource)


async def test_cancelled_caller_ends_its_call() -> None:
    """A cancelled caller returns when its call has ended, and its scope is left as always."""
    begun, ended = anyio.Event(), False

    async def wait() -> None:
        nonlocal ended
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended = True

    async def cancel() -> None:
        await begun.wait()
        scope.cancel()

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(cancel)
            await call_alone(wait())
    assert (scope.cancelled_caught, ended) == (True, True)


async def test_call_that_cancels_itself_is_an_error() -> None:
    """A call that was cancelled by its library is a lost connection, not our cancellation."""

    async def give_up() -> None:
        raise asyncio.CancelledError

    with pytest.raises(ConnectionAbortedError):
        await call_alone(give_up())


@pytest.mark.parametrize("steps", range(8))
async def test_server_that_ends_while_a_call_connects_is_an_error_of_the_connection(
    tmp_path: Path, steps: int
) -> None:
    """Wherever in the connecting a kubelet ends, its caller gets an error that it knows."""
    path = tmp_path / "kubelet.sock"
    ended = anyio.Event()

    async def call() -> None:
        with pytest.raises((OSError, StreamTerminatedError)):
            await call_raw(path, "/v1.PodResourcesLister/List", b"", 30)
        ended.set()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            for _ in range(steps):
                await checkpoint()
            listener.close()
            with anyio.fail_after(30):
                await ended.wait()
