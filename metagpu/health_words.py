"""What keeps a GPU, or one of its backends, from serving: in words and colours for people."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.text import Text

_OUT: Final = "bold red"


def brief_health(gpu: Mapping[str, Any]) -> Text:
    """Say in a word for each what `full_health` gives the reasons of."""
    words = [Text("out of service", style=_OUT)] if not gpu["healthy"] else []
    for word, there in (
        ("instance out", gpu["faults"]),
        ("cordoned", gpu["cordon"]),
        ("suspended", gpu["suspended"]),
        ("cleaning", gpu["cleaning"]),
        ("withheld", gpu["blocked"]),
        ("waiting", gpu["waitsFor"]),
    ):
        if there:
            words.append(Text(word, style="yellow"))
    return Text("\n").join(words) if words else Text("healthy", style="green")


def reasons(gpus: Sequence[Mapping[str, Any]]) -> Sequence[Text]:
    """Say below a table what `brief_health` has no room for: a line for each reason."""
    return [
        Text(f"GPU {gpu['index']}: ") + line
        for gpu in gpus
        for line in full_health(gpu).split("\n")
        if line.plain != "healthy"
    ]


def full_health(gpu: Mapping[str, Any]) -> Text:
    """Say whether a GPU is healthy, and all that keeps it or one of its backends from serving."""
    lines = [] if gpu["healthy"] else [_since(gpu["reason"], gpu, _OUT)]
    for fault in gpu["faults"]:
        slots = ", ".join(share.partition("::")[2] for share in fault["shares"]) or "not of ours"
        lines.append(
            _since(f"MIG device {fault['device']} ({slots}): {fault['reason']}", fault, _OUT)
        )
    if cordon := gpu["cordon"]:
        lines.append(_since(f"cordoned: {cordon['reason']}", cordon))
    for backend, pause in gpu["suspended"].items():
        lines.append(_since(f"{backend} suspended: {pause['reason']}", pause))
    for backend, since in gpu["cleaning"].items():
        lines.append(Text(f"{backend} cleans it since {_moment(since)}", style="yellow"))
    lines += [Text(blocked, style="yellow") for blocked in gpu["blocked"]]
    if gpu["waitsFor"]:
        lines.append(Text(gpu["waitsFor"], style="yellow"))

    return Text("\n").join(lines) if lines else Text("healthy", style="green")


def _since(why: str, what: Mapping[str, Any], style: str = "yellow") -> Text:
    return Text(f"{why}, since {_moment(what['since'])}", style=style)


def _moment(since: str) -> str:
    return since.removesuffix("+00:00").replace("T", " ") + " UTC"
