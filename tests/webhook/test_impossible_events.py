"""Events of pods that no node could serve."""

import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from anyio import to_thread

from metagpu.plugins.cluster.event_recorder import BURST, MINOR
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.webhook.impossible_events import BURST as BURST_OF_ALL
from metagpu.webhook.messages import PATH
from tests.rigs.waiting import becomes
from tests.webhook.rig import NAME, Authority, pod, review
from tests.webhook.test_program import add_node, program

OWNER: Final = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "name": "train-7d",
    "uid": "u-1",
    "controller": True,
}
Send = Callable[[bytes], Awaitable[dict[str, Any]]]


def huge(amount: int = 90000, **metadata: object) -> dict[str, Any]:
    """Return a pod that no node could serve."""
    found = pod({"nvidia.com/gpumem": str(amount)})
    found["metadata"] |= metadata
    return found


def owned(amount: int = 90000) -> dict[str, Any]:
    """Return such a pod of a ReplicaSet, which the API server names after the review."""
    found = huge(amount, ownerReferences=[OWNER])
    del found["metadata"]["name"]
    return found


@asynccontextmanager
async def serving(
    api: SimApiServer, folder: Path, authority: Authority, *, events: bool = True
) -> AsyncIterator[Send]:
    """Run the webhook beside an API server; yield what sends it a review."""
    trust = await to_thread.run_sync(
        lambda: ssl.create_default_context(cafile=str(authority.certificate))
    )
    add_node(api, "gpu-1", 200)
    async with (
        api.running(),
        program(api, folder.parent, folder, events=events) as (webhook, session),
    ):
        await becomes(lambda: not webhook.problems())
        url = f"https://127.0.0.1:{webhook.server.port}{PATH}"

        async def send(body: bytes) -> dict[str, Any]:
            async with session.post(url, data=body, ssl=trust, server_hostname=NAME) as response:
                assert response.status == 200
                answer = json.loads(await response.read())
            found: dict[str, Any] = answer["response"]
            return found

        yield send


async def test_the_controller_gets_an_event(folder: Path, authority: Authority) -> None:
    """A Deployment's author, who sees no warning, finds an Event of its ReplicaSet."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        response = await send(review(owned()))
        await api.until(api.events)

    [event] = api.events()
    assert event["regarding"] == {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": "train-7d",
        "uid": "u-1",
        "namespace": "team-a",
    }
    assert event["metadata"]["namespace"] == "team-a"
    assert (event["reason"], event["type"]) == ("GPURequestImpossible", "Warning")
    assert [event["note"]] == response["warnings"]


async def test_a_pod_without_a_controller_is_named(folder: Path, authority: Authority) -> None:
    """An owner that is no controller is not the pod's author."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        await send(review(huge(ownerReferences=[{**OWNER, "controller": False}])))
        await api.until(api.events)

    [event] = api.events()
    assert event["regarding"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "train",
        "namespace": "team-a",
    }


async def test_what_gets_no_event(folder: Path, authority: Authority) -> None:
    """Dry runs, pods without any name, and what is translated or unreadable write none."""
    nameless = huge()
    del nameless["metadata"]["name"]
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        await send(review(owned(), dry_run=True))
        await send(review(nameless))
        await send(review(pod({"nvidia.com/gpumem": "8000"})))
        await send(review(pod({"nvidia.com/gpumem": "1500m"})))
        await send(review(huge(90001)))  # the last one
        await api.until(api.events)

    assert ["90001" in it["note"] for it in api.events()] == [True]


async def test_without_the_option_nothing_is_written(folder: Path, authority: Authority) -> None:
    """By default the webhook sends the API server nothing but reads."""
    api = SimApiServer()
    async with serving(api, folder, authority, events=False) as send:
        assert (await send(review(owned())))["warnings"]

    assert {it.method for it in api.requests} == {"GET"}


async def test_a_storm_writes_few_events(folder: Path, authority: Authority) -> None:
    """Pods of one controller are one Event; ever new sentences stay within the namespace's rate."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        for _ in range(50):
            await send(review(owned()))
        await api.until(api.events)
        assert len(api.events()) == 1
        for number in range(100):
            await send(review(huge(90000 + number, name=f"pod-{number}")))
        await send(review(huge(), namespace="team-b"))  # after all others
        await api.until(lambda: any(it["metadata"]["namespace"] == "team-b" for it in api.events()))

    assert 1 < len(api.events()) <= BURST * MINOR + 2


async def test_invented_namespaces_write_few_events(folder: Path, authority: Authority) -> None:
    """A client that invents namespaces meets the rate of all together."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        for number in range(BURST_OF_ALL + 20):
            await send(review(huge(), namespace=f"team-{number}"))
        await api.until(lambda: len(api.events()) >= BURST_OF_ALL)
        assert len(api.events()) < BURST_OF_ALL + 20


@pytest.mark.parametrize("field", ["name", "uid", "kind", "apiVersion"])
async def test_names_that_kubernetes_refuses_take_no_memory(
    folder: Path, authority: Authority, field: str
) -> None:
    """A webhook sees owners before anybody has checked them."""
    api = SimApiServer()
    async with serving(api, folder, authority) as send:
        await send(review(huge(ownerReferences=[{**OWNER, field: "x" * 254}])))
        await send(review(huge(90001)))  # the last one
        await api.until(api.events)

    assert ["90001" in it["note"] for it in api.events()] == [True]


@pytest.mark.parametrize("broken", ["denied", "failing"])
async def test_a_failing_api_server_delays_no_review(
    folder: Path, authority: Authority, broken: str
) -> None:
    """Reviews are answered while Events cannot be written; once they can, one is."""
    api = SimApiServer()
    getattr(api, broken).append(("POST", "/events"))
    async with serving(api, folder, authority) as send:
        for _ in range(20):
            assert (await send(review(owned())))["allowed"] is True
        assert api.events() == []
        getattr(api, broken).clear()
        await api.until(api.events)
