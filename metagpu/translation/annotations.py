"""Annotations of pods that a translation reads and writes."""

import json
from collections.abc import Mapping
from typing import Any, Final

from metagpu.translation.values import Object

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
    except (ValueError, TypeError):
        return {}  # a value that nobody of ours wrote
