"""The offers of all Nodes, listed in pages and watched."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.watch import Informer
from metagpu.translation.node_offers import NodeGroups
from metagpu.translation.values import NodeOffer

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

PATH: Final = "/api/v1/nodes"
PAGE: Final = 250
"""Nodes of one request: a Node with its images has 20 kB, ten times as much once decoded."""


class NodeOffers(Informer):
    """Offers of the Nodes with extended resources; of a Node nothing else is kept.

    Attributes:
        groups: the Nodes, in groups of equals.
        known: whether all Nodes have been read once; what is known stays while the API server is
            away.
        version: a number that grows with each change of an offer.
    """

    def __init__(self, client: "KubeClient") -> None:
        super().__init__(client, PATH, "", PATH)
        self.known = False
        self.version = 0
        self.groups = NodeGroups()

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in the complete list of Nodes."""
        self._replace([NodeOffer.from_node(it) for it in items])

    def on_update(self, item: KubeObject) -> None:
        """Take in a Node that is new or changed; most changes are none of its offer."""
        offer = NodeOffer.from_node(item)
        if not offer.allocatable:
            self._remove(offer.name)
        else:
            self._put(offer)

    def on_delete(self, item: KubeObject) -> None:
        """Take in the deletion of a Node."""
        self._remove(str(item["metadata"]["name"]))

    async def _list(self) -> str:
        """List in pages: all Nodes of a large cluster at once would take the pod's memory."""
        found: list[NodeOffer] = []
        query = {"limit": str(PAGE)}
        while True:
            answer = await self._client.call("GET", self.path, query=query)
            found += [NodeOffer.from_node(it) for it in answer.get("items") or ()]
            if not (following := answer["metadata"].get("continue")):
                break
            query["continue"] = following
        self._record_success()
        self._replace(found)
        return str(answer["metadata"]["resourceVersion"])

    def _replace(self, found: Sequence[NodeOffer]) -> None:
        offers = {it.name: it for it in found if it.allocatable}
        for name in self.groups.nodes.keys() - offers:
            self._remove(name)
        for offer in offers.values():
            self._put(offer)
        self.known = True

    def _put(self, offer: NodeOffer) -> None:
        if self.groups.nodes.get(offer.name) != offer:
            self.groups.put(offer)
            self.version += 1

    def _remove(self, name: str) -> None:
        if name in self.groups.nodes:
            self.groups.remove(name)
            self.version += 1
