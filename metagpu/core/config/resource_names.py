"""The rules of Kubernetes for resource names."""

import re

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN_LIMIT = 244
"""253 characters of a DNS name, less the prefix `requests.` that Kubernetes adds."""


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
