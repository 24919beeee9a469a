"""Kubernetes' rules for resource names (kubelet.md §1.3, case 3)."""

import pytest

from metagpu.core.config.resource_names import name_problem

ACCEPTED = [
    "cnvrg.io/metagpu",
    "vendor.com/foo_Bar-1.2",
    "vendor.com/" + "a" * 63,
    "v" * 200 + "/foo",
    "v" * 244 + "/foo",
    "a.b.c.d/x",
    "localhost/X",
    "1.2/3",
    "requests/foo",
    "my-requests.com/foo",
    "kubernetes.iot/foo",
]
DOMAIN = "the domain must be a lower-case DNS name of at most 244 characters"
PARTS = "it needs a domain, one `/` and a name, as in cnvrg.io/metagpu"
LAST = "the name after `/` must be 1 to 63 of A-Z a-z 0-9 . _ -, alphanumeric at both ends"
OWN = "kubernetes.io is Kubernetes' own domain"
REFUSED = [
    ("foo", PARTS),
    ("", PARTS),
    ("vendor.com/", PARTS),
    ("vendor.com/a/b", PARTS),
    ("kubernetes.io/foo", OWN),
    ("vendor.kubernetes.io/foo", OWN),
    ("requests.vendor.com/foo", "a domain must not begin with `requests.`"),
    ("Vendor.com/foo", DOMAIN),
    ("/foo", DOMAIN),
    ("v" * 245 + "/foo", DOMAIN),
    ("vendor..com/foo", DOMAIN),
    ("-vendor.com/foo", DOMAIN),
    ("vendor.com-/foo", DOMAIN),
    ("vendor_a.com/foo", DOMAIN),
    ("vendor.com\n/foo", DOMAIN),
    ("vendor.com/" + "a" * 64, LAST),
    ("vendor.com/-x", LAST),
    ("vendor.com/x-", LAST),
    ("vendor.com/x y", LAST),
    ("vendor.com/é", LAST),
    ("vendor.com/x\n", LAST),
]


@pytest.mark.parametrize("name", ACCEPTED)
def test_names_the_kubelet_takes(name: str) -> None:
    """A name that a kubelet was seen to accept is accepted."""
    assert name_problem(name) is None


@pytest.mark.parametrize(("name", "reason"), REFUSED)
def test_names_the_kubelet_refuses(name: str, reason: str) -> None:
    """A name that a kubelet refuses is refused first, with the rule it breaks."""
    assert name_problem(name) == reason
