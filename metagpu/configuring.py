"""The commands about configurations: `validate`, which reads them, and `plan`, which compares."""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import anyio
from msgspec.structs import replace

from metagpu.core.backend import installed_backends
from metagpu.core.errors import ConfigError
from metagpu.core.layout import Layout
from metagpu.core.plan import State
from metagpu.options import source_of
from metagpu.plugins import control
from metagpu.sources import Loaded, Source

if TYPE_CHECKING:
    from metagpu.app import Agent

AgentOf = Callable[[Source, str | None], "Agent"]
"""Makes an agent for a source and, if given, a simulated node."""


def validate(args: argparse.Namespace) -> int:
    """Check files, each by itself; with `--convert` print what they are together."""
    if args.convert:
        return _convert(source_of(args, args.files))

    wrong = 0
    told: set[str] = set()
    for file in args.files:
        for label, found in _checked(source_of(args, [file])):
            name = f"{file} [{label}]" if label else str(file)
            if isinstance(found, ConfigError):
                wrong += 1
                _say(str(found))
            else:
                _warn(found, told)
                foreign = [form for form in found.formats if form != "metagpu/v1"]
                print(": ".join([name, "good", *foreign]))  # noqa: T201 - a command line speaks so
    return 1 if wrong else 0


def plan(args: argparse.Namespace, agent_of: AgentOf) -> dict[str, Any]:
    """Say what the configuration would change, of the daemon's or of another.

    Raises:
        MetagpuError: if no daemon answers, or a configuration is wrong.
    """
    source = source_of(args)
    loaded = source.load(installed_backends())
    _warn(loaded, set())

    if args.simulate is None and args.before is None:
        request = {"command": "plan", "text": loaded.text, "file": loaded.config.file}
        answer: dict[str, Any] = control.ask(args.run_dir, request)
        return answer

    old = source_of(args, args.before or ())
    old = replace(old, choice=replace(old.choice, required=False))
    args.agent = agent = agent_of(old, args.simulate)
    anyio.run(agent.look)
    before = State(agent.layout, agent.config) if args.before else State(Layout((), {}, ()))
    return agent.laying.planned(loaded.config, before)


def warn(agent: "Agent") -> None:
    """Tell what of an agent's configuration is not honoured."""
    _warn(agent.adoption.loaded, set())


def _checked(source: Source) -> Iterable[tuple[str, Loaded | ConfigError]]:
    """Check a source in every way that it leaves open."""
    backends = installed_backends()

    try:
        for label, variant in source.variants():
            try:
                yield label, variant.load(backends)
            except ConfigError as error:
                yield label, error
    except ConfigError as error:
        yield "", error


def _convert(source: Source) -> int:
    """Print a configuration in our words, also one whose backends are not installed."""
    backends = installed_backends()
    texts = source.read()
    text, notes = source.converted(texts)

    for note in notes:
        _say(f"warning: {note}")
    print(text, end="")  # noqa: T201 - as above
    source.understand(texts, backends)
    return 0


def _warn(loaded: Loaded, told: set[str]) -> None:
    for note in map(str, loaded.notes):
        if note not in told:
            told.add(note)
            _say(f"warning: {note}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - as above
