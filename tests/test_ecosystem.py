"""The examples of docs/ecosystem.md, and its files, ask for what nodes offer."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from metagpu.translation.node_offers import NodeGroups
from tests.kubectl.test_translate import nodes_file, run, written
from tests.test_docs import blocks
from tests.translation.nodes import node

PAGE: Final = "docs/ecosystem.md"
NODES: Final = (node("shares", "a100-40gb"), node("mig", "a100-pcie-40gb", "mig"))
FILES: Final = Path(__file__).parents[1] / "deploy" / "ecosystem"
TEXTS: Final[list[str]] = [
    *((FILES / f"{name}.yaml").read_text("utf-8") for name in ("kuberay", "kubeflow")),
    *(text for page, text in blocks("yaml") if page == PAGE),
]
EXAMPLES: Final = [document for text in TEXTS for document in yaml.safe_load_all(text)]
_RESOURCE: Final = re.compile(r"[a-z0-9.]+/(?:metagpu|gpu.*|mig-.+)")


def resources(value: object) -> Iterator[str]:
    """Yield the names of GPU resources in a value, as keys and as texts."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from (*resources(key), *resources(entry))
    elif isinstance(value, list):
        for entry in value:
            yield from resources(entry)
    elif isinstance(value, str) and _RESOURCE.fullmatch(value):
        yield value


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda value: str(value.get("kind", next(iter(value))))
)
def test_the_examples_ask_for_what_nodes_offer(example: dict[str, Any]) -> None:
    """Each names at least one resource, and none that metagpu's nodes have not."""
    assert {*resources(example)}
    assert {*resources(example)} <= NodeGroups(NODES).offered


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if "kind" in example],
    ids=lambda document: str(document["kind"]),
)
def test_the_examples_are_left_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: dict[str, Any]
) -> None:
    """Nothing of an object is in other terms, and Ray counts its GPUs right."""
    status, out, err = run(capsys, written(tmp_path, example), nodes_file(tmp_path, *NODES))

    assert (status, err) == (0, "")
    assert yaml.safe_load(out) == example


def test_the_page_has_an_example_of_each() -> None:
    """Four objects, and values of two charts."""
    assert [example.get("kind") or next(iter(example)) for example in EXAMPLES] == [
        "RayCluster",
        "TrainJob",
        "Notebook",
        "InferenceService",
        "servingEngineSpec",
        "singleuser",
    ]
