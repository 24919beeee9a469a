"""The code between a decoded Allocate and its answer stays small: counted, not timed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import anyio

import metagpu
from metagpu.plugins.kubelet.device_plugin import DevicePluginService
from metagpu.plugins.kubelet.fast_codec import decode_allocate_request
from metagpu.plugins.kubelet.pb import v1beta1
from tests.plugins.kubelet.rig import Node, gpu, simulated_kubelet

PACKAGE: Final = str(Path(metagpu.__file__).parent)
FUNCTIONS, MODULES, DEPTH = 48, 12, 11
"""The ceilings: comprehensions and lambdas belong to their function, as in Python from 3.12 on."""


class Profile:
    """The functions of metagpu that are entered, and how deep.

    Attributes:
        entered: the file and the first line of each function.
        depth: the most functions of metagpu that were open at once.
    """

    def __init__(self) -> None:
        self.entered: set[tuple[str, str]] = set()
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:  # noqa: ANN401 - of setprofile
        """Take one event of `sys.setprofile`."""
        if event == "call" and _is_ours(frame.f_code):
            self.entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))
            self.depth = max(self.depth, sum(_is_ours(caller.f_code) for caller in _callers(frame)))


def _is_ours(code: CodeType) -> bool:
    name = code.co_name
    return code.co_filename.startswith(PACKAGE) and not (
        name.startswith("<") and name != "<lambda>"
    )


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


async def test_a_grant_of_thirty_shares_enters_few_functions(tmp_path: Path) -> None:
    """From the request's bytes to the answer's, with a list open, as the kubelet has it."""
    node = Node(simulated_kubelet(tmp_path))
    node.find(*(gpu(index) for index in range(8)))
    node.offer("version: metagpu/v1\npools: [{name: all, backends: [{backend: fraction}]}]\n")
    [resource] = node.layout.backends
    service = DevicePluginService(resource, node.registry, lambda name: node.layout.backends[name])
    ids = [share.id for share in node.layout.shares[:30]]
    request = bytes(
        v1beta1.AllocateRequest([v1beta1.ContainerAllocateRequest(devices_ids=list(ids))])
    )
    assert decode_allocate_request(request) == [ids]

    async with anyio.create_task_group() as group:
        lists = node.registry.watch(service._list.view)
        await anext(lists)
        group.start_soon(anext, lists)
        await anyio.wait_all_tasks_blocked()
        profile = Profile()
        sys.setprofile(profile)
        try:
            await service._allocate(request)
        finally:
            sys.setprofile(None)
        group.cancel_scope.cancel()

    assert len(node.registry.snapshot.gpus[gpu(0).id].leases) == 30
    assert len(profile.entered) <= FUNCTIONS, sorted(profile.entered)
    assert len({file for file, _ in profile.entered}) <= MODULES
    assert profile.depth <= DEPTH
