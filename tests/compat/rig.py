"""Conversions as tests want them: texts in, plain data, sentences and shares out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

import pytest

from metagpu.compat import formats, manifest
from metagpu.compat.contract import Circumstances, Converted
from metagpu.core.config import Config
from metagpu.core.document import Document
from metagpu.core.errors import ConfigError
from metagpu.core.gpu import Gpu
from metagpu.core.injection import Injection
from metagpu.core.layout import Layout, lay_out
from metagpu.sources import written
from tests.build import BACKENDS

FILES: Final = Path(__file__).parent / "files"


def document(text: str, file: str = "f.yaml") -> Document:
    """Read a text as a file; of a ConfigMap with one file, that file."""
    read = Document(text, file)
    if manifest.is_manifest(read):
        [(part, line)] = manifest.texts(read).values()
        return Document(part, file, line)
    return read


class Told(TypedDict, total=False):
    """What no file says."""

    node: str | None
    mig_config: str | None
    environment: Mapping[str, str]


def converted(*texts: str, **told: Unpack[Told]) -> Converted:
    """Convert the files of one configuration; they are called f.yaml, g.yaml and so on."""
    documents = [document(text, f"{chr(ord('f') + n)}.yaml") for n, text in enumerate(texts)]
    return formats.convert(formats.together(documents), Circumstances(**told))


def pools(*texts: str, **told: Unpack[Told]) -> list[dict[str, Any]]:
    """Convert, and give the pools."""
    found: list[dict[str, Any]] = converted(*texts, **told).data["pools"]
    return found


def notes(*texts: str, **told: Unpack[Told]) -> list[str]:
    """Convert, and give the sentences that an operator reads."""
    return list(map(str, converted(*texts, **told).notes))


def refusal(*texts: str, **told: Unpack[Told]) -> str:
    """Give the sentence with which files are refused, by a conversion or as what it gives."""
    with pytest.raises(ConfigError) as caught:
        offered(converted(*texts, **told))
    return str(caught.value)


def laid(conversion: Converted, *gpus: Gpu) -> Layout:
    """Lay the result over some GPUs.

    Raises:
        ConfigError: of the line that the fault comes from.
    """
    if (missing := conversion.missing(BACKENDS)) is not None:
        raise missing
    try:
        config = Config(Document(written(conversion.data), "<converted>"), BACKENDS)
        return lay_out(config, gpus, Injection())
    except ConfigError as error:
        raise conversion.retold(error) from None


def offered(conversion: Converted, *gpus: Gpu) -> dict[str, int]:
    """Count what is offered of some GPUs under each resource name; raises as `laid`."""
    layout = laid(conversion, *gpus)
    return {
        resource: sum(share.resource == resource for share in layout.shares)
        for resource in layout.backends
    }
