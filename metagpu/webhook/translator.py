"""Answers to reviews: from memory, at once, by the watched offers of all Nodes."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import structlog

from metagpu.plugins.cluster.node_object import KubeObject
from metagpu.plugins.cluster.watch import Informer
from metagpu.translation.node_offers import NodeGroups
from metagpu.translation.translate import translate_among
from metagpu.translation.values import NodeOffer, Translation, TranslationSettings
from metagpu.webhook import reviews

if TYPE_CHECKING:
    from metagpu.plugins.cluster.client import KubeClient

NODES: Final = "/api/v1/nodes"
NODES_PAGE: Final = 250
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
        super().__init__(client, NODES, "", NODES)
        self.known = False
        self.version = 0
        self.groups = NodeGroups()

    def on_list(self, items: Sequence[KubeObject]) -> None:
        """Take in the complete list of Nodes."""
        self._replace([NodeOffer.from_node(item) for item in items])

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
        query = {"limit": str(NODES_PAGE)}
        while True:
            answer = await self._client.call("GET", self.path, query=query)
            found += [NodeOffer.from_node(item) for item in answer.get("items") or ()]
            if not (following := answer["metadata"].get("continue")):
                break
            query["continue"] = following
        self._record_success()
        self._replace(found)
        return str(answer["metadata"]["resourceVersion"])

    def _replace(self, found: Sequence[NodeOffer]) -> None:
        offers = {node_offer.name: node_offer for node_offer in found if node_offer.allocatable}
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


CACHED: Final = 512
"""Translations that are remembered, until the nodes change."""
CACHED_KEY: Final = 16 * 1024
"""Bytes of the largest request that is remembered."""
UNREADY: Final = "metagpu has not read the nodes yet; the pod's GPU request is unchanged"
TOO_LARGE: Final = "metagpu translates no pod of {}; the pod's GPU request is unchanged"
FAILED: Final = "metagpu failed, as its log says; the pod's GPU request is unchanged"

log = structlog.get_logger()


class Outcome(StrEnum):
    """The result of a review."""

    TRANSLATED = "translated"
    UNTOUCHED = "untouched"
    IMPOSSIBLE = "impossible"
    UNREADABLE = "unreadable"
    REFUSED = "refused"
    UNREADY = "unready"
    FAILED = "failed"
    MALFORMED = "malformed"


class KnownNodes(Protocol):
    """The nodes as they are known now.

    Attributes:
        known: whether all nodes have been read once.
        version: a number that changes with the offers.
        groups: the nodes with extended resources.
    """

    known: bool
    version: int
    groups: NodeGroups


class ReviewAnswer(NamedTuple):
    """A result, and the review to send; its body is empty for a malformed request."""

    outcome: Outcome
    body: bytes
    problem: str = ""


class _Remembered(NamedTuple):
    translation: Translation
    patch: str


class Translator:
    """Answers reviews with translations; equal requests are translated once.

    A fault of metagpu's own lets a pod pass as it is: a webhook stands in nobody's way.

    Args:
        report: takes each request that is admitted though no node could serve it, and why.
    """

    def __init__(
        self,
        nodes: KnownNodes,
        settings: TranslationSettings,
        report: Callable[[reviews.ReviewRequest, str], None] = lambda *_: None,
    ) -> None:
        self._nodes = nodes
        self._settings = settings
        self._report = report
        self._version = -1
        self._cache: dict[bytes, _Remembered] = {}

    def answer(self, body: bytes) -> ReviewAnswer:
        """Return the answer to the body of a request."""
        try:
            request = reviews.decode_request(body)
        except (msgspec.DecodeError, ValueError) as error:
            return ReviewAnswer(Outcome.MALFORMED, b"", str(error))
        return self._answer(request)

    def _answer(self, request: reviews.ReviewRequest) -> ReviewAnswer:
        try:
            key = reviews.pod_key(request) if request.creates_pod else b""
        except reviews.TooLargeError as error:
            body = reviews.allow(request.uid, warnings=[TOO_LARGE.format(error)])
            return ReviewAnswer(Outcome.UNTOUCHED, body)
        except (msgspec.DecodeError, ValueError) as error:
            return ReviewAnswer(Outcome.MALFORMED, b"", str(error))
        if not key:
            return ReviewAnswer(Outcome.UNTOUCHED, reviews.allow(request.uid))
        if not self._nodes.known:
            return ReviewAnswer(Outcome.UNREADY, reviews.allow(request.uid, warnings=[UNREADY]))
        try:
            found = self._translate(key)
            answer = self._judge(request.uid, found)
            if answer.outcome is Outcome.IMPOSSIBLE:
                self._report(request, found.translation.impossible or "")
        except Exception:
            log.exception("translation failed", namespace=request.namespace)
            return ReviewAnswer(Outcome.FAILED, reviews.allow(request.uid, warnings=[FAILED]))
        return answer

    def _translate(self, key: bytes) -> _Remembered:
        if self._version != self._nodes.version:
            self._cache.clear()
            self._version = self._nodes.version
        if (found := self._cache.get(key)) is not None:
            return found
        translation = translate_among(reviews.decode_key(key), self._nodes.groups, self._settings)
        found = _Remembered(translation, reviews.encode_patch(translation.operations))
        if len(key) <= CACHED_KEY:
            if len(self._cache) >= CACHED:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = found
        return found

    def _judge(self, uid: str, found: _Remembered) -> ReviewAnswer:
        translation, patch = found
        problem = translation.unreadable or translation.impossible
        if problem and self._settings.impossible == "refuse":
            others = () if translation.unreadable else translation.warnings
            return ReviewAnswer(Outcome.REFUSED, reviews.refuse(uid, problem, others))
        if translation.impossible is None:
            outcome = Outcome.TRANSLATED if patch else Outcome.UNTOUCHED
            if translation.unreadable:
                outcome = Outcome.UNREADABLE
            return ReviewAnswer(outcome, reviews.allow(uid, patch, translation.warnings))
        warnings = list(dict.fromkeys((translation.impossible, *translation.warnings)))
        return ReviewAnswer(Outcome.IMPOSSIBLE, reviews.allow(uid, patch, warnings))
