"""Annotations of pods that a translation reads and writes: HAMi's, and ours.

A mode, a policy and a model are honoured; `warnings` has a sentence for each of the others.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from metagpu.translation.node_offers import PRODUCT
from metagpu.translation.values import NodeOffer, Object

MODE: Final = "nvidia.com/vgpu-mode"
NODE_POLICY: Final = "hami.io/node-scheduler-policy"
ORIGINAL: Final = "metagpu.io/original-request"
"""The annotation with the request as the pod had it, by container."""
GPUS_PREFIX: Final = "gpus.metagpu.io/"
"""The annotation of a container: the number of GPUs that its shares are divided over."""


def annotations_of(pod: Object) -> Object:
    """Return the annotations of a pod."""
    return (pod.get("metadata") or {}).get("annotations") or {}


def original_request(pod: Object) -> Mapping[str, Any]:
    """Return the request of a pod that is translated, by container."""
    text = annotations_of(pod).get(ORIGINAL)
    if not text:
        return {}
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {}  # a value that nobody of ours wrote


USE_TYPE: Final = "nvidia.com/use-gputype"
NOUSE_TYPE: Final = "nvidia.com/nouse-gputype"


def names_model(annotations: Object) -> bool:
    """Return whether a pod names or refuses models."""
    return bool(_names(annotations, USE_TYPE) or _names(annotations, NOUSE_TYPE))


def refused_model(annotations: Object, node: NodeOffer) -> str:
    """Return the annotation that refuses a node's model, empty where none does.

    A name is part of a product, in any case of letters, as in HAMi. A label has `-` for spaces. A
    node without the label has no model that a pod could name.
    """
    product = node.labels.get(PRODUCT, "")
    wanted, unwanted = _names(annotations, USE_TYPE), _names(annotations, NOUSE_TYPE)
    if wanted and not _matches(product, wanted):
        return f"{USE_TYPE}: {annotations[USE_TYPE]}"
    if unwanted and (not product or _matches(product, unwanted)):
        return f"{NOUSE_TYPE}: {annotations[NOUSE_TYPE]}"
    return ""


def _names(annotations: Object, key: str) -> Sequence[str]:
    names = str(annotations.get(key) or "").split(",")
    plain = [name.strip().replace(" ", "-").lower().removeprefix("nvidia-") for name in names]
    return [text for text in plain if text]


def _matches(product: str, names: Sequence[str]) -> bool:
    return any(name in product.lower() for name in names)
