"""The rules of Kubernetes for the names of resources and of DRA drivers."""

import re

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN_LIMIT = 244
"""253 characters of a DNS name, less the prefix `requests.` that Kubernetes adds."""
_DRIVER_LIMIT = 63


def name_problem(name: str) -> str | None:
    """Return why Kubernetes rejects an extended resource's name; `None` if valid.

    The rules are those of Kubernetes' IsExtendedResourceName: a domain, one `/`, a name.
    """
    domain, _, last = name.partition("/")

    if not last or "/" in last:
        return "it needs a domain, one `/` and a name, as in cnvrg.io/metagpu"
    if "kubernetes.io/" in name:
        return "kubernetes.io is Kubernetes' own domain"
    if domain.startswith("requests."):
        return "a domain must not begin with `requests.`"
    if len(domain) > _DOMAIN_LIMIT or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", domain):
        return f"the domain must be a lower-case DNS name of at most {_DOMAIN_LIMIT} characters"
    if not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", last):
        return "the name after `/` must be 1 to 63 of A-Z a-z 0-9 . _ -, alphanumeric at both ends"
    return None


def driver_problem(name: str) -> str | None:
    """Return why Kubernetes rejects the name of a DRA driver; `None` if valid."""
    if len(name) > _DRIVER_LIMIT or not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", name):
        return f"it must be a lower-case DNS name of at most {_DRIVER_LIMIT} characters"
    return None
