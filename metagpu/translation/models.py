"""Models of GPUs that a pod names or refuses, by HAMi's annotations."""

from collections.abc import Sequence
from typing import Final

from metagpu.translation.parts import PRODUCT
from metagpu.translation.values import NodeOffer, Object

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
    plain = [it.strip().replace(" ", "-").lower().removeprefix("nvidia-") for it in names]
    return [it for it in plain if it]


def _matches(product: str, names: Sequence[str]) -> bool:
    return any(name in product.lower() for name in names)
