"""The simulated API server answers metagpu's requests as Kubernetes does."""

import json
from typing import Any

import anyio
import pytest
from aiohttp import ClientSession, web

from metagpu.sim.apiserver.objects import ApiError, Key, Object, ObjectStore
from metagpu.sim.apiserver.server import SimApiServer

NODE: Key = ("nodes", "", "n")


def store(**labels: str) -> ObjectStore:
    """Create a store with one Node."""
    made = ObjectStore()
    made.put(NODE, {"metadata": {"labels": labels}, "spec": {}, "status": {}})
    return made


def applied(
    object_store: ObjectStore, manager: str, *, force: bool = False, **labels: str
) -> Object:
    """Apply labels of the Node in a manager's name."""
    said = {"metadata": {"labels": labels}}
    return object_store.apply(NODE, said, status=False, manager=manager, force=force)


def labels_of(object_store: ObjectStore) -> dict[str, str]:
    """Return the Node's labels."""
    return dict(object_store.get_object(NODE)["metadata"]["labels"])


def test_a_label_that_is_left_out_is_removed() -> None:
    """A manager that leaves a label out removes it, unless other managers apply it too."""
    object_store = store(hostname="n")
    applied(object_store, "a", x="1", y="1")
    applied(object_store, "b", y="1")
    applied(object_store, "a")

    assert labels_of(object_store) == {"hostname": "n", "y": "1"}


def test_conflict_names_the_label_and_force_wins() -> None:
    """Another value of another manager's label is refused; the same value is shared."""
    object_store = store()
    applied(object_store, "a", x="1")
    applied(object_store, "b", x="1")
    with pytest.raises(ApiError) as refusal:
        applied(object_store, "b", x="2")

    assert refusal.value.code == 409
    assert refusal.value.status["details"]["causes"] == [
        {"reason": "FieldManagerConflict", "field": ".metadata.labels.x"}
    ]
    applied(object_store, "b", force=True, x="2")
    assert labels_of(object_store) == {"x": "2"}


def test_nothing_new_makes_no_version() -> None:
    """A write that changes nothing creates no version and no watch event."""
    object_store = store()
    applied(object_store, "a", x="1")
    version = object_store.version
    applied(object_store, "a", x="1")

    assert object_store.version == version


def test_merge_wants_the_version_it_was_made_for() -> None:
    """A patch with an old version is refused; null removes a key."""
    object_store = store(x="1")
    old = object_store.get_object(NODE)["metadata"]["resourceVersion"]
    object_store.merge(NODE, {"metadata": {"labels": {"x": None}}}, status=False, manager="m")
    assert labels_of(object_store) == {}

    patch: dict[str, Any] = {"metadata": {"resourceVersion": old}}
    with pytest.raises(ApiError, match="has been modified"):
        object_store.merge(NODE, patch, status=False, manager="m")


def test_status_is_written_through_its_own_door() -> None:
    """A patch of the object leaves its status alone, and one of the status the rest."""
    object_store = store()
    both = {"spec": {"a": 1}, "status": {"b": 2}}
    object_store.merge(NODE, both, status=False, manager="m")
    assert (object_store.get_object(NODE)["spec"], object_store.get_object(NODE)["status"]) == (
        {"a": 1},
        {},
    )

    object_store.merge(NODE, {"spec": {"a": 3}, "status": {"b": 2}}, status=True, manager="m")
    assert (object_store.get_object(NODE)["spec"], object_store.get_object(NODE)["status"]) == (
        {"a": 1},
        {"b": 2},
    )


def test_conditions_of_others_stay() -> None:
    """Conditions are applied by type; the manager's own go when the manager applies none."""
    object_store = store()
    object_store.merge(
        NODE, {"status": {"conditions": [{"type": "Ready"}]}}, status=True, manager="kubelet"
    )
    for conditions in ([{"type": "Ours", "status": "True"}], []):
        said = {"status": {"conditions": conditions}}
        object_store.apply(NODE, said, status=True, manager="m", force=True)
        found = [each["type"] for each in object_store.get_object(NODE)["status"]["conditions"]]
        assert found == ["Ready", *(each["type"] for each in conditions)]


def test_another_object_of_the_same_name_is_not_touched() -> None:
    """A uid in an apply request has to be the object's."""
    with pytest.raises(ApiError, match="UID"):
        store().apply(NODE, {"metadata": {"uid": "other"}}, status=False, manager="m", force=True)


def test_an_invalid_label_is_refused() -> None:
    """A label value that Kubernetes refuses is refused here too."""
    with pytest.raises(ApiError, match="Invalid value"):
        applied(store(), "a", x="not a label")


async def test_a_watch_has_what_comes_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change during the sending of another is sent too."""
    server = SimApiServer()
    server.add_node("n")
    write = web.StreamResponse.write

    async def write_and_change(self: web.StreamResponse, data: bytes) -> None:
        if "second" not in server.labels("n"):
            server.label("n", {"second": "2"})
        await write(self, data)

    monkeypatch.setattr(web.StreamResponse, "write", write_and_change)
    query = {"watch": "true", "resourceVersion": str(server.store.version), "timeoutSeconds": "60"}
    headers = {"Authorization": f"Bearer {server.token}"}
    seen: list[dict[str, str]] = []

    async with server.running(), ClientSession(headers=headers) as session:
        server.label("n", {"first": "1"})
        path = f"http://127.0.0.1:{server.port}/api/v1/nodes"
        async with session.get(path, params=query) as answer:
            with anyio.fail_after(30):
                while len(seen) < 2:
                    event = json.loads(await answer.content.readline())
                    seen.append(event["object"]["metadata"]["labels"])

    assert seen == [{"first": "1"}, {"first": "1", "second": "2"}]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("", "abc"),
        ("app", "ab"),
        ("!app", "c"),
        ("app=web", "a"),
        ("app==web,x.y/tier=one", "a"),
        ("app!=web", "bc"),
        ("app in (web, db)", "ab"),
        ("app notin (db),x.y/tier", "a"),
        ("app=", ""),
    ],
)
async def test_a_label_selector_means_what_it_means_to_kubernetes(
    selector: str, names: str
) -> None:
    """Equality, sets and presence; a missing label is unequal to each value."""
    server = SimApiServer()
    server.add_node("a", {"app": "web", "x.y/tier": "one"})
    server.add_node("b", {"app": "db"})
    server.add_node("c")
    status, body = await listed(server, labelSelector=selector)
    assert (status, "".join(item["metadata"]["name"] for item in body["items"])) == (200, names)


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("labelSelector", "app in"),
        ("labelSelector", "a b"),
        ("labelSelector", "app=not a label"),
        ("labelSelector", "!app=x"),
        ("labelSelector", ",app"),
        ("fieldSelector", "spec.nodeName"),
    ],
)
async def test_a_selector_that_cannot_be_read_is_a_bad_request(name: str, selector: str) -> None:
    """The answer is 400 with the part that was not understood, for lists and watches."""
    status, body = await listed(SimApiServer(), **{name: selector})
    assert (status, body["reason"]) == (400, "BadRequest")
    assert "unable to parse requirement: found '" in body["message"]


async def listed(server: SimApiServer, **query: str) -> tuple[int, Any]:
    """Return the status and the answer to a list of Nodes."""
    headers = {"Authorization": f"Bearer {server.token}"}
    async with server.running(), ClientSession(headers=headers) as session:
        path = f"http://127.0.0.1:{server.port}/api/v1/nodes"
        async with session.get(path, params=query) as answer:
            return answer.status, await answer.json()


async def test_a_client_without_a_token_needs_the_secret_path() -> None:
    """Kubectl sends no token without TLS: the kubeconfig has a path that nobody guesses."""
    server = SimApiServer()
    server.add_node("n")
    async with server.running(), ClientSession() as session:
        for path, headers, status in (
            ("", {}, 401),
            (f"/{server.key}", {}, 200),
            (f"/{server.key}", {"Authorization": "Bearer other"}, 401),
            ("/other", {}, 401),
        ):
            url = f"http://127.0.0.1:{server.port}{path}/api/v1/nodes/n?x=y"
            async with session.get(url, headers=headers) as answer:
                assert answer.status == status
                body = await answer.json()
        assert body["kind"] == "Status"


async def test_what_nobody_serves_is_not_found() -> None:
    """A collection is there in its versions alone, and nobody creates objects without a cluster."""
    server = SimApiServer()
    headers = {"Authorization": f"Bearer {server.token}"}
    async with server.running(), ClientSession(headers=headers) as session:
        root = f"http://127.0.0.1:{server.port}"
        for path, status in (
            ("/api/v1/pods", 200),
            ("/apis/resource.k8s.io/v1beta1/resourceclaims", 200),
            ("/apis/resource.k8s.io/v1beta1/resourceslices", 404),
            ("/apis/apps/v1beta1/deployments", 404),
            ("/api/v1/rayclusters", 404),
        ):
            async with session.get(root + path) as answer:
                assert answer.status == status, path
        async with session.post(f"{root}/api/v1/namespaces/a/pods", json={}) as answer:
            assert answer.status == 405
