"""NVML's texts for its error codes, including those that pynvml lacks."""

from typing import Final

import pynvml

_FURTHER: Final = {
    pynvml.NVML_ERROR_IN_USE: "In use by another client",
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: "Insufficient Resources",
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: "Argument version mismatch",
}


def error_text(code: int) -> str:
    """Return the text of NVML's own `nvmlErrorString` for a code."""
    texts = {**pynvml.NVMLError._errcode_to_string, **_FURTHER}  # noqa: SLF001 - NVML's own texts

    return str(texts.get(code, "Unknown Error"))
