"""The commands about configurations: `validate` checks them, `plan` compares them."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from metagpu.agent.config_source import Checked, ConfigSource, Loaded
from metagpu.cli.options import source_of
from metagpu.compat.contract import CompatNote
from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.contracts.backend import installed_backends
from metagpu.core.devices.devices import (
    ExtendedResource,
    classes_of_driver,
    extended_resource_of,
)
from metagpu.core.errors import MetagpuError
from metagpu.core.grants.injection import Injection
from metagpu.core.model.offers import Api
from metagpu.display.options import encode
from metagpu.plugins.control.client import send_request

if TYPE_CHECKING:
    from metagpu.agent.agent import Agent

AgentOf = Callable[[ConfigSource, str | None], "Agent"]
"""Builds an agent for a source and, if given, a simulated node."""


def validate(args: argparse.Namespace) -> int:
    """Check each configuration of the files; with `--convert` print all as one."""
    if args.convert:
        return _convert(source_of(args, args.files))

    classes = _classes_in(args.device_classes)
    checks = [
        (", ".join(map(str, files)), label, _with_classes(found, classes))
        for files in _configurations(args.files)
        for label, found in _check(source_of(args, files))
    ]
    if args.output != "table":
        report = [_to_dict(file, label, found) for file, label, found in checks]
        print(encode(report, args.output), end="")  # noqa: T201 - a command line speaks so
    else:
        _print_checks(checks)
    return 1 if any(found.errors for *_, found in checks) else 0


def plan(args: argparse.Namespace, agent_of: AgentOf) -> dict[str, Any]:
    """Return the changes of a configuration, to the daemon's or to `--from`.

    Raises:
        MetagpuError: if no daemon answers, or a configuration is wrong.
    """
    source = source_of(args)
    loaded = source.load(installed_backends())
    _print_notes(loaded, set())

    if args.simulate is None and args.before is None:
        request = {"command": "plan", "text": loaded.text, "file": loaded.config.file}
        answer: dict[str, Any] = send_request(args.run_dir, request)
        return answer

    import anyio

    from metagpu.core.layout.diff import ConfiguredLayout
    from metagpu.core.layout.layout import Layout

    old = source_of(args, args.before or ())
    old = replace(old, choice=replace(old.choice, required=False))
    args.agent = agent = agent_of(old, args.simulate)
    anyio.run(agent.survey_once)
    before = (
        ConfiguredLayout(agent.layout, agent.config)
        if args.before
        else ConfiguredLayout(Layout((), {}, ()))
    )
    return agent.layout_manager.plan(loaded.config, before)


def print_notes(agent: "Agent") -> None:
    """Print the settings of an agent's configuration that are not honoured."""
    _print_notes(agent.config_loader.loaded, set())


def _configurations(files: Sequence[Path]) -> Iterable[Sequence[Path]]:
    """Return files, together where they are different parts of one configuration."""
    parts = {file: ConfigSource((file,)).parts() for file in dict.fromkeys(files)}
    families: dict[object, list[Path]] = {}
    for file, its in parts.items():
        names = {family for family, _ in its}
        families.setdefault(names.pop() if len(names) == 1 else file, []).append(file)
    for together in families.values():
        every = [part for file in together for part in parts[file]]
        differ = len(set(every)) == len(every)
        yield from [together] if differ else [[file] for file in together]


def _check(source: ConfigSource) -> Iterable[tuple[str, Checked]]:
    """Check a source once for each open choice; yield a name and the outcome."""
    backends = installed_backends()

    try:
        for label, variant in source.variants():
            try:
                yield label, variant.check(backends)
            except ConfigError as error:
                yield label, Checked(None, (error,))
    except ConfigError as error:
        yield "", Checked(None, (error,))


def _classes_in(files: Sequence[str]) -> Mapping[str, Sequence[ExtendedResource]]:
    """Return the extended resources of the DeviceClasses in each file.

    Raises:
        ConfigError: a file cannot be read, or a class has another form.
    """
    if not files:
        return {}

    from metagpu.compat.kube_documents import read_documents
    from metagpu.sim.cluster.document_forms import check_document

    found: dict[str, list[ExtendedResource]] = {}
    for file in files:
        classes = [
            document for document in read_documents(file) if document.value["kind"] == "DeviceClass"
        ]
        for device_class in classes:
            try:
                check_document(device_class.value)
            except MetagpuError as error:
                raise device_class.error(str(error), ConfigReason.INVALID_VALUE) from error
        served = [extended_resource_of(document.value) for document in classes]
        found[file] = [resource for resource in served if resource is not None]
    return found


def _with_classes(checked: Checked, classes: Mapping[str, Sequence[ExtendedResource]]) -> Checked:
    """Return an outcome with an error for each name that a DeviceClass has too."""
    if checked.loaded is None or checked.errors:
        return checked
    config = checked.loaded.config
    driver, built = config.root.dra.driver, config.build_backends(Injection())
    if not any(pool.api is Api.DRA for pool, _ in built):
        return checked  # nothing is published here that a class could select
    errors = [
        config.error(
            f"pools[{number}].backends[{place}].resource",
            f"{resource} is offered by the device plugin, and is the extendedResourceName of the "
            f"DeviceClass {taken[resource]} ({file}): while the Node has an amount of 0, the "
            "scheduler would take the class, which counts devices; give it another `resource`, "
            "or change the class",
            ConfigReason.NAME_TAKEN,
        )
        for file, found in classes.items()
        if (taken := classes_of_driver(found, driver))
        for number, (pool, backends) in enumerate(built)
        if pool.api is Api.DEVICE_PLUGIN
        for place, backend in enumerate(backends)
        for resource in backend.resources
        if resource in taken
    ]
    return replace(checked, errors=(*checked.errors, *errors))


def _print_checks(checks: Iterable[tuple[str, str, Checked]]) -> None:
    """Print errors and warnings, each once, and the files that are good."""
    printed: set[str] = set()
    for file, label, found in checks:
        for text in map(str, found.errors):
            if text not in printed:
                printed.add(text)
                _print_error(text)
        if found.loaded is None:
            continue
        _print_notes(found.loaded, printed)
        if not found.errors:
            name = f"{file} [{label}]" if label else file
            foreign = [form for form in found.loaded.formats if form != "metagpu/v1"]
            print(": ".join([name, "good", *foreign]))  # noqa: T201 - a command line speaks so


def _to_dict(file: str, label: str, found: Checked) -> dict[str, Any]:
    def place(note: ConfigError | CompatNote) -> dict[str, Any]:
        return {"file": note.file, "line": note.line or None, "path": note.path}

    return {
        "file": file,
        "case": label or None,
        "good": not found.errors,
        "formats": list(found.loaded.formats) if found.loaded else [],
        "errors": [
            {**place(error), "reason": error.reason, "problem": error.problem}
            for error in found.errors
        ],
        "warnings": [
            {**place(note), "text": note.text}
            for note in (found.loaded.notes if found.loaded else ())
        ],
    }


def _convert(source: ConfigSource) -> int:
    """Print a configuration as metagpu/v1, also if its backends are not installed."""
    backends = installed_backends()
    texts = source.read()
    text, notes = source.convert(texts)

    for note in notes:
        _print_error(f"warning: {note}")
    print(text, end="")  # noqa: T201 - as above
    source.parse(texts, backends)
    return 0


def _print_notes(loaded: Loaded, printed: set[str]) -> None:
    for note in map(str, loaded.notes):
        if note not in printed:
            printed.add(note)
            _print_error(f"warning: {note}")


def _print_error(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201 - as above
