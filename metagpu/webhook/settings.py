"""Settings, limits and times of the webhook."""

from pathlib import Path

import msgspec

from metagpu.plugins.cluster.settings import ClusterTiming
from metagpu.plugins.http.address import ListenAddress
from metagpu.translation.values import TranslationSettings


class WebhookTiming(msgspec.Struct, frozen=True):
    """Times of the webhook, all in seconds.

    Attributes:
        handshake: for a client to finish the handshake of TLS.
        request: for a client to send the body of its request.
        keep_alive: that an idle connection stays open: longer than the 90 s after which the API
            server closes its own, so that no request meets a connection that ends.
        drain: from SIGTERM to the end: until then the Service may still send requests here.
        late_loop: the delay of the event loop from which the webhook counts as dead.
        cluster: the times of the watch of Nodes.
    """

    handshake: int = 5
    request: float = 5.0
    keep_alive: float = 120.0
    drain: float = 5.0
    late_loop: float = 10.0
    cluster: ClusterTiming = ClusterTiming(spread=1.0)


class WebhookLimits(msgspec.Struct, frozen=True):
    """Limits of clients; together they are less than the container's memory.

    Attributes:
        body: bytes of a request; an object that the API server accepts has 3 MiB at most.
        small: bytes of a request that is always read.
        bodies: bytes that have come of all other requests.
        connections: open connections; with one more another is closed.
        burst: connections that are accepted at once.
        rate: connections a second that are accepted beyond the burst.
    """

    body: int = 4 * 1024 * 1024
    small: int = 64 * 1024
    bodies: int = 32 * 1024 * 1024
    connections: int = 512
    burst: int = 512
    rate: float = 200.0


class WebhookSettings(msgspec.Struct, frozen=True):
    """Settings of serving and of translations.

    Attributes:
        address: the address of the reviews, by TLS.
        certificate: the folder with `tls.crt` and `tls.key`, as of a mounted Secret.
        metrics: the address of metrics and probes, without TLS; `None` serves none.
        kubeconfig: a file with address and credentials of the API server; `None` takes those of
            the pod.
        translation: names of resources, order of techniques, and what happens to requests that no
            node can meet.
        events: whether an Event says which pods no node could serve.
    """

    address: ListenAddress
    certificate: Path
    metrics: ListenAddress | None = None
    kubeconfig: Path | None = None
    translation: TranslationSettings = TranslationSettings()
    events: bool = False
    timing: WebhookTiming = WebhookTiming()
    limits: WebhookLimits = WebhookLimits()
