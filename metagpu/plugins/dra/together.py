"""Requests of a ResourceClaim that a container gets together. Pure.

A container names one request of a claim, or the whole claim. Of a claim for extended resources it
names all its own requests: the scheduler makes one claim for a pod.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final

from msgspec.structs import replace

from metagpu.core.grants.grant import Grant
from metagpu.core.grants.injection import joined_variables

_EXTENDED: Final = re.compile(r"(container-\d+)-request-\d+")
"""The requests that the scheduler makes for the extended resources of a container."""


def whole_claim_name(uid: str) -> str:
    """Return the CDI name, without its kind, of all requests of a claim together."""
    return f"{uid}.all"


def is_joint(requests: Iterable[str]) -> bool:
    """Return whether a container that names the claim gets several requests."""
    those = set(requests)
    return len(those) > 1 and not all(map(_EXTENDED.fullmatch, those))


def with_joint_variables(
    uid: str, grants: Mapping[str, Grant], requests: Mapping[str, str]
) -> Mapping[str, Grant]:
    """Return what containers get by each CDI name of a claim.

    Args:
        uid: of the claim.
        grants: what containers get of one request, by CDI name.
        requests: the request of each CDI name.
    """
    together = defaultdict[str, list[Grant]](list)
    for name, grant in grants.items():
        those = together[_container(requests[name])]
        if not any(it is grant for it in those):  # the devices of a request may have one grant
            those.append(grant)
    found = {
        name: replace(grant, envs=joined_variables(together[_container(requests[name])]))
        for name, grant in grants.items()
    }
    if is_joint(requests.values()):
        everything = joined_variables(chain.from_iterable(together.values()))
        found[whole_claim_name(uid)] = Grant(everything)
    return found


def _container(request: str) -> str:
    """Return the container of an extended resource's request; else the request."""
    found = _EXTENDED.fullmatch(request)
    return found[1] if found else request
