"""What a label of Kubernetes may look like."""

import re
from typing import Final

_LIMIT: Final = 63
_FORM: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def sanitised(product: str) -> str:
    """Write a product's name as a label may have it, and as GPU Feature Discovery does."""
    return re.sub(r"[^A-Za-z0-9\-_. ]", "", product).strip().replace(" ", "-")


def legal(name: str, value: str) -> bool:
    """Tell whether Kubernetes takes a label; an empty value is legal and says nothing."""
    return all(len(it) <= _LIMIT and _FORM.fullmatch(it) for it in (name.partition("/")[2], value))
