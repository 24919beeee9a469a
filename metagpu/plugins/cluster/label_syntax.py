"""The syntax of Kubernetes labels and names."""

import re
from typing import Final

_LIMIT: Final = 63
_NAME_LIMIT: Final = 230
"""Of the 253 characters of an object's name, those before what makes it unique."""
_PATTERN: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def sanitize(product: str) -> str:
    """Convert a product's name to a label value, as GPU Feature Discovery does."""
    return re.sub(r"[^A-Za-z0-9\-_. ]", "", product).strip().replace(" ", "-")


def is_valid(name: str, value: str) -> bool:
    """Return whether Kubernetes accepts a label, and its value is not empty."""
    return all(
        len(it) <= _LIMIT and _PATTERN.fullmatch(it) for it in (name.partition("/")[2], value)
    )


def name_part(text: str) -> str:
    """Convert a text to the first part of an object's name.

    The name of an owner, for instance, is free text.
    """
    labels = re.sub(r"[^a-z0-9.-]+", "-", text.lower())[:_NAME_LIMIT].split(".")
    return ".".join(filter(None, (label.strip("-") for label in labels))) or "unnamed"
