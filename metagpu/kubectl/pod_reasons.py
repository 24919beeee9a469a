"""Kinds of answers about a pod, of `kubectl metagpu why` and `fit`."""

from enum import StrEnum
from typing import TypeAlias


class PodReason(StrEnum):
    """The kind of an answer, which no release changes; its sentence is for people.

    - fits: a node can take the pod now.
    - fits_nowhere: each node has an obstacle; the answer has that of the nearest node.
    - quota_exceeded: a ResourceQuota of the namespace allows fewer shares or devices.
    - controller_refused: the API server refuses the pods of a controller, as for a quota.
    - claim_missing: a ResourceClaim of the pod, or its template, does not exist.
    - claims_unreadable: the user may not read ResourceClaims.
    - claims_of_others: the ResourceClaims of the pod request no device of metagpu.
    - no_request: no container requests a GPU resource.
    - unknown_node: the pod names a node that the cluster does not have.
    - no_nodes: the cluster has no node.
    - starting: the pod is bound to a node, whose kubelet has not started it.
    - running: the pod runs.
    - device_lost: a container of the pod holds a GPU or MIG device that no longer exists.
    - ended: the pod has ended successfully.
    - failed: the pod has failed, not by metagpu.
    - rejected: the kubelet has rejected the pod.
    """

    FITS = "fits"
    FITS_NOWHERE = "fits_nowhere"
    QUOTA_EXCEEDED = "quota_exceeded"
    CONTROLLER_REFUSED = "controller_refused"
    CLAIM_MISSING = "claim_missing"
    CLAIMS_UNREADABLE = "claims_unreadable"
    CLAIMS_OF_OTHERS = "claims_of_others"
    NO_REQUEST = "no_request"
    UNKNOWN_NODE = "unknown_node"
    NO_NODES = "no_nodes"
    STARTING = "starting"
    RUNNING = "running"
    DEVICE_LOST = "device_lost"
    ENDED = "ended"
    FAILED = "failed"
    REJECTED = "rejected"


Conclusion: TypeAlias = tuple[PodReason, str, str]
"""The kind, the sentence that helps most, and what to change; empty where nothing has to be."""
