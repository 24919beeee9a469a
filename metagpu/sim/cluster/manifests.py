"""Objects of manifests at the simulated cluster, and its controllers."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import structlog

from metagpu.sim.apiserver.objects import KINDS, ApiError, Key, Object
from metagpu.sim.apiserver.rest import APPLIED
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.cluster import pod_objects
from metagpu.sim.cluster.claim_versions import as_v1
from metagpu.sim.cluster.document_forms import check_document, stored_spec
from metagpu.sim.cluster.workloads import WORKLOADS, control, owner_of
from metagpu.sim.machine.gpu import SimError

log = structlog.get_logger()

_TIMEOUT: Final = 20.0
"""Seconds that a command waits for what becomes of its pods; the client waits 30."""
_OWNED: Final = frozenset(("pods", "replicasets", "resourceclaims"))
"""The collections of what controllers make."""

Document = Mapping[str, Any]


class Manifests:
    """Objects that people give to the cluster, and what its controllers make of them.

    Args:
        api: the API server.
        is_up: returns whether the kubelet runs; without it no pod ends.
    """

    def __init__(self, api: SimApiServer, is_up: Callable[[], bool]) -> None:
        self._api, self._is_up = api, is_up
        api.admit, api.remove = self._admit, self._remove

    # ---- what a user may do ----------------------------------------------------------------

    async def create(self, documents: Sequence[Document]) -> Collection[Key]:
        """Create objects that do not exist, all or none; return the keys of their pods.

        Raises:
            SimError: a document is not valid, or exists.
        """
        contents = self._contents(documents, "default")
        for key, content in contents.items():
            if key in self._api.store.objects:
                raise SimError(
                    f"{content['kind'].lower()} {key[2]} exists in namespace {key[1]}; end it "
                    "first, or take another name"
                )
        return await self._put(contents)

    async def apply(
        self, documents: Sequence[Document], namespace: str
    ) -> tuple[Mapping[Key, str], Collection[Key]]:
        """Create or change objects, all or none.

        Returns:
            whether each was `created`, `configured` or `unchanged`, and the keys of their pods.

        Raises:
            SimError: a document is not valid, or changes what nobody can change.
        """
        contents, objects = self._contents(documents, namespace), self._api.store.objects
        outcomes, changed = {}, {}
        for key, content in contents.items():
            _note(content)
            try:
                after = self._api.changed(key, content)
            except ApiError as error:
                raise SimError(str(error)) from None
            outcomes[key] = "configured" if key in objects else "created"
            if after == objects.get(key):
                outcomes[key] = "unchanged"
            else:
                changed[key] = after
        return outcomes, await self._put(changed, contents)

    def install(self, documents: Sequence[Document]) -> None:
        """Replace objects; what the earlier ones owned ends by the controllers' next run."""
        for key, content in self._contents(documents, "default").items():
            if key in self._api.store.objects:
                self._api.store.delete(key)
            self._api.store.put(key, content)

    async def delete(self, documents: Sequence[Document], namespace: str) -> bool:
        """Delete the objects of a manifest; return whether they are gone.

        Raises:
            SimError: a document is not valid, or none of them exists.
        """
        found = self._contents(documents, namespace).keys() & self._api.store.objects.keys()
        if not found:
            raise SimError("none of these objects exists")
        return await self.remove(found)

    async def remove(self, keys: Collection[Key]) -> bool:
        """Delete objects with all that they own or contain; return whether all are gone.

        While no kubelet runs, no pod ends.
        """
        objects = self._api.store.objects
        spaces = {name for kind, _, name in keys if kind == "namespaces"}
        chosen = {*keys, *(document for document in objects if document[1] in spaces)}
        uids = {
            document: objects[document]["metadata"]["uid"]
            for document in {*chosen, *self._pods_of(chosen)}
        }
        for key in keys:
            self._remove(key)
        self.keep()

        def are_gone() -> bool:
            return all(
                key not in objects or objects[key]["metadata"]["uid"] != uid
                for key, uid in uids.items()
            )

        with suppress(TimeoutError):
            await self._api.until(lambda: are_gone() or not self._is_up(), within=_TIMEOUT)
        return are_gone()

    # ---- what controllers do ---------------------------------------------------------------

    def keep(self) -> None:
        """Run each controller once, and delete what has lost its owner."""
        store = self._api.store
        for collection in WORKLOADS:
            for key in [key for key in store.objects if key[0] == collection]:
                try:
                    self._control(store.objects[key])
                except Exception:  # one that was patched may have any form
                    log.exception("workload failed", workload="/".join(key))
        uids = {entry["metadata"]["uid"] for entry in store.objects.values()}
        for key, document in list(store.objects.items()):
            if key[0] in _OWNED and owner_of(document) and owner_of(document) not in uids:
                self._remove(key)

    def _control(self, workload: Object) -> None:
        store, uid = self._api.store, workload["metadata"]["uid"]
        children = [entry for entry in store.objects.values() if owner_of(entry) == uid]
        made, surplus = control(workload, children)
        for key, content in (_content(entry, "") for entry in made):
            if key not in store.objects or owner_of(store.objects[key]) == uid:
                store.put(key, content)
        for document in surplus:
            self._remove(_key(document))

    def _contents(self, documents: Sequence[Document], namespace: str) -> dict[Key, Object]:
        found: dict[Key, Object] = {}
        for document in documents:
            key, content = self._admit(document, namespace)
            if key in found:
                raise SimError(f"{document['kind'].lower()} {key[2]} stands there twice")
            found[key] = content
        return found

    @staticmethod
    def _admit(document: Document, namespace: str) -> tuple[Key, Object]:
        """Return an object as the API server stores it, with its key.

        Raises:
            SimError: the object is not valid.
        """
        newest = as_v1(_without_nulls(document))
        check_document(newest)
        return _content(newest, namespace)

    async def _put(
        self, contents: Mapping[Key, Object], owners: Collection[Key] = ()
    ) -> Collection[Key]:
        """Write objects, and wait until it is decided what becomes of their pods."""
        for key, content in contents.items():
            self._api.store.put(key, content)
        self.keep()
        objects, pods = self._api.store.objects, self._pods_of(owners or contents)

        def are_decided() -> bool:
            return all(pod not in objects or pod_objects.is_settled(objects[pod]) for pod in pods)

        with suppress(TimeoutError):
            await self._api.until(are_decided, within=_TIMEOUT)
        return pods

    def _pods_of(self, keys: Collection[Key]) -> list[Key]:
        """Return the pods among some objects, and those that they own."""
        objects = self._api.store.objects
        owners = {entry["metadata"]["uid"]: owner_of(entry) for entry in objects.values()}
        chosen = {objects[key]["metadata"]["uid"] for key in keys}

        def chain(uid: str) -> Iterator[str]:
            while uid:
                yield uid
                uid = owners.get(uid, "")

        return [
            key
            for key, document in objects.items()
            if key[0] == "pods" and not chosen.isdisjoint(chain(document["metadata"]["uid"]))
        ]

    def _remove(self, key: Key) -> None:
        """Delete an object; a bound pod ends first, a claim is released.

        A Namespace goes with all that is in it.
        """
        store = self._api.store
        inside = [other for other in store.objects if other[1] == key[2]]
        for other in inside if key[0] == "namespaces" else ():
            self._remove(other)
        document = store.objects.get(key)
        if document is None or "deletionTimestamp" in document["metadata"]:
            return
        if (key[0] == "pods" and pod_objects.node_of(document)) or key[0] == "resourceclaims":
            deletion = {"metadata": {"deletionTimestamp": pod_objects.timestamp(time.time())}}
            store.merge(key, deletion, status=False, manager="kubectl")
        else:
            store.delete(key)


def _content(document: Document, namespace: str) -> tuple[Key, Object]:
    """Return an object as the API server stores it, with its key."""
    kind = KINDS[document["kind"]]
    metadata = {**(document.get("metadata") or {})}
    for name in ("labels", "annotations"):
        metadata.setdefault(name, {})
    metadata["creationTimestamp"] = pod_objects.timestamp(time.time())
    for name in ("uid", "resourceVersion", "managedFields", "deletionTimestamp"):
        metadata.pop(name, None)
    content: Object = {**document, "apiVersion": kind.api, "metadata": metadata}
    content["status"] = {"phase": "Pending"} if document["kind"] == "Pod" else {}
    if "spec" in document:
        content["spec"] = stored_spec(document)
    space = str(metadata.get("namespace") or namespace) if kind.namespaced else ""
    return (kind.collection, space, str(metadata["name"])), content


def _key(document: Object) -> Key:
    kind, metadata = KINDS[document["kind"]], document["metadata"]
    return kind.collection, metadata.get("namespace", ""), metadata["name"]


def _note(content: Object) -> None:
    """Note in an object what the user says of it, as kubectl does."""
    metadata = content["metadata"]
    metadata["annotations"].pop(APPLIED, None)
    about = {name: value for name, value in metadata.items() if name != "creationTimestamp"}
    said = {**content, "metadata": about}
    del said["status"]
    metadata["annotations"][APPLIED] = json.dumps(said)


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a document without nulls, but for those in a driver's parameters."""
    if isinstance(value, Mapping):
        return {
            name: each if name == "parameters" else _without_nulls(each)
            for name, each in value.items()
            if each is not None
        }
    return [_without_nulls(each) for each in value] if isinstance(value, list | tuple) else value
