"""Errors of the commands of kubectl metagpu; the class names the cause.

MetagpuError
├── CordonFailed            a node's daemon: it does not follow the annotation of a cordon
├── DrainFailed             pods: they still hold the GPU
├── UnknownPod              the user: there is no such pod
├── NotListed               the user: no object of that name is listed
├── NoKubeconfig            the user: there are no credentials for the API server
├── NotInstalled            the cluster: it has no daemon of metagpu, that the user may see
├── SeveralNamespaces       the cluster: more than one namespace has daemons
├── NodeNotServed           the node: metagpu does not run on it
├── NoAnswer                a node's daemon: it does not answer through the API server
├── PrometheusError         Prometheus: it refuses a query, or cannot be reached
├── NoData                  Prometheus: it has no metrics of metagpu for a time
└── FieldMissing            a node's report: it lacks a field that the command reads
"""

from collections.abc import Iterator
from contextlib import contextmanager

from metagpu.core.errors import MetagpuError
from metagpu.core.reports.reading import FieldMissing


class CordonFailed(MetagpuError):
    """Raised when a node's daemon does not follow the annotation of a cordon."""


class DrainFailed(MetagpuError):
    """Raised when pods still hold a GPU at the end of a drain."""


class UnknownPod(MetagpuError):
    """Raised when there is no pod of a name, nor a controller whose pods are refused."""


class NotListed(MetagpuError):
    """Raised when no object that is asked for by name is listed."""


class NoKubeconfig(MetagpuError):
    """Raised when there are no credentials for the API server."""


class NotInstalled(MetagpuError):
    """Raised when no pod that the user may list is a daemon of metagpu."""


class SeveralNamespaces(MetagpuError):
    """Raised when several namespaces have daemons of metagpu."""


class NodeNotServed(MetagpuError):
    """Raised when a node has no daemon of metagpu."""


class NoAnswer(MetagpuError):
    """Raised when a node's daemon gives no answer, or an incomplete one."""


class PrometheusError(MetagpuError):
    """Raised when Prometheus refuses a query or cannot be reached."""


class NoData(MetagpuError):
    """Raised when Prometheus has no metrics of metagpu for a time."""


@contextmanager
def report_of(node: str) -> Iterator[None]:
    """Name the node where its report lacks a field that the block reads.

    Raises:
        NoAnswer: the report lacks one.
    """
    try:
        yield
    except FieldMissing as error:
        raise NoAnswer(f"{node}: {error}") from None
