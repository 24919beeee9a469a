"""Writes what the chart in `deploy/chart` determines: manifests for kubectl, and a table of values.

`python deploy/render.py` writes the files, `--check` compares them. Manifests need helm: the
program that the variable HELM names, or the one in PATH.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

HERE: Final = Path(__file__).parent
CHART: Final = HERE / "chart"
NAMESPACE: Final = "kube-system"
KUBERNETES: Final = "1.36.0"
IMAGE: Final = "registry.example.com/metagpu"
"""The image of the manifests, to be changed there; the chart has none of its own."""
CONFIG: Final = {
    "version": "metagpu/v1",
    "pools": [
        {
            "name": "all",
            "backends": [
                {"backend": "fraction", "resource": "cnvrg.io/metagpu", "sharesPerGpu": 100}
            ],
        }
    ],
}
"""The profile of `static.yaml`: what metagpu offers without a file, to be changed there."""

MANIFESTS: Final[Mapping[str, Sequence[str]]] = {
    "static": (),
    "rbac": (),
    "viewers": (),
    "admission-policy": (),
    "janitor-policy": (),
    "dra": ("dra.enabled=true",),
    "janitor": ("features.janitor=true",),
    "webhook": ("webhook.enabled=true", "webhook.certificate.from=cert-manager"),
    "one-resource-per-container": ("oneResourcePerContainer.enabled=true",),
}
"""Manifest -> values beside the defaults; all but `static` are one template of the same name."""

_HEAD: Final = "# Rendered from deploy/chart by `make chart`: change the chart, not this file.\n"
_HELM_ALONE: Final = re.compile(
    r"^(# Source: | +helm\.sh/chart: | +app\.kubernetes\.io/(managed-by|version): ).*\n",
    re.MULTILINE,
)
_LONGEST_DEFAULT: Final = 60


def find_helm() -> str | None:
    """Return the path of helm, `None` where there is none."""
    return os.environ.get("HELM") or shutil.which("helm")


def render(helm: str, *options: str) -> str:
    """Return the manifests of the chart, with options of `helm template`.

    Raises:
        ValueError: helm refused the options; the text is its own.
    """
    command = [helm, "template", "metagpu", str(CHART), "--namespace", NAMESPACE]
    command += ["--kube-version", KUBERNETES, "--set", f"image.repository={IMAGE}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip())
    return done.stdout


def manifest(helm: str, name: str) -> str:
    """Return the text of `deploy/NAME.yaml`, without the labels by which helm knows its own."""
    options = ["--set-json", f"config.inline={json.dumps(CONFIG)}"]
    options += [part for value in MANIFESTS[name] for part in ("--set", value)]
    if name != "static":
        options += ["--show-only", f"templates/{name}.yaml"]
    return _HEAD + _HELM_ALONE.sub("", render(helm, *options)).removeprefix("---\n")


def readme() -> str:
    """Return the chart's README with the present table of values."""
    text = (CHART / "README.md").read_text(encoding="utf-8")
    before, mark, _ = text.partition("| Value | Default | Meaning |\n")
    rows = "".join(f"| `{key}` | {shown} | {meaning} |\n" for key, shown, meaning in values())
    return f"{before}{mark}|---|---|---|\n{rows}"


def values() -> Iterator[tuple[str, str, str]]:
    """Yield path, default and meaning of each value, by the comments of values.yaml.

    Raises:
        ValueError: a value has no comment.
    """
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    yield from _rows(root, text.splitlines(), "")


def _rows(
    mapping: yaml.MappingNode, lines: Sequence[str], path: str
) -> Iterator[tuple[str, str, str]]:
    for key, value in mapping.value:
        name = f"{path}{key.value}"
        inner = value.value if isinstance(value, yaml.MappingNode) else []
        if any(_comment(lines, child.start_mark.line) for child, _ in inner):
            yield from _rows(value, lines, f"{name}.")
        elif meaning := _comment(lines, key.start_mark.line):
            yield name, _default(value), meaning
        else:
            raise ValueError(f"values.yaml: {key.start_mark.line + 1}: {name} has no comment")


def _comment(lines: Sequence[str], line: int) -> str:
    """Return the comment of one line above a key."""
    above = lines[line - 1].strip() if line else ""
    return above.removeprefix("# ") if above.startswith("# ") else ""


def _default(node: yaml.Node) -> str:
    value: Any = yaml.SafeLoader("").construct_document(node)
    text = json.dumps(value)
    return f"`{text}`" if len(text) <= _LONGEST_DEFAULT else "[values.yaml](values.yaml)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(arguments).check

    if (helm := find_helm()) is None:
        print("no helm: install it, or name it by the variable HELM", file=sys.stderr)
        return 1
    texts = {HERE / f"{name}.yaml": manifest(helm, name) for name in MANIFESTS}
    texts[CHART / "README.md"] = readme()
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.write_text(texts[path])
        print(f"{'stale' if check else 'written'}: {path.relative_to(HERE.parent)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
