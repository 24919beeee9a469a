"""The command line of `metagpu sim`: one parser per command of `node_commands`."""

import argparse
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from metagpu.core.config.errors import ConfigError, ConfigReason
from metagpu.core.config.units import Duration
from metagpu.display.options import add_json
from metagpu.sim.commands.cluster_arguments import add_cluster_arguments
from metagpu.sim.commands.cluster_commands import AnyClusterCommand
from metagpu.sim.commands.node_commands import AnySimCommand, ProcessCommand
from metagpu.sim.machine.gpu_models import GPU_MODELS
from metagpu.sim.machine.spec import RECOVERY_ACTIONS

_EXAMPLES: Final[dict[str, str]] = {
    "xid": "xid 0 79",
    "lose": "lose 0",
    "recovery-action": "recovery-action 0 gpu-reset",
    "reset": "reset 0",
    "mig": "mig on 0",
    "instance": "instance create 0 2g.10gb@4",
    "provisioning": "provisioning 0 --duration 2s --failures 1",
    "ecc": "ecc 0 --double-bit",
    "hang": "hang 0 10s",
    "add-gpu": "add-gpu a100-40gb",
    "driver": "driver unload",
    "reboot": "reboot",
    "show": "show --json",
}
_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "gpu": {"metavar": "GPU", "help": "index or UUID of the GPU"},
    "code": {"metavar": "XID", "type": int, "help": "number of the XID, such as 79"},
    "action": {"metavar": "ACTION", "help": f"one of {', '.join(RECOVERY_ACTIONS)}"},
    "model": {"metavar": "MODEL", "help": f"one of {', '.join(GPU_MODELS)}"},
    "seconds": {"metavar": "TIME", "help": "duration, such as 10s"},
    "placement": {
        "metavar": "PROFILE@START",
        "help": "MIG profile and first memory slice, such as 2g.10gb@4",
    },
    "--duration": {
        "metavar": "TIME",
        "default": "0",
        "help": "time to create a GPU instance (default: 0)",
    },
    "--compute-duration": {
        "metavar": "TIME",
        "default": "0",
        "help": "time to create a compute instance (default: 0)",
    },
    "--in-use": {
        "metavar": "TIME",
        "default": "0",
        "help": 'time during which NVML answers "in use" (default: 0)',
    },
    "--failures": {
        "metavar": "N",
        "type": int,
        "default": 0,
        "help": "number of GPU instances that fail next (default: 0)",
    },
    "--compute-failures": {
        "metavar": "N",
        "type": int,
        "default": 0,
        "help": "number of compute instances that fail next (default: 0)",
    },
    "--removal-failures": {
        "metavar": "N",
        "type": int,
        "default": 0,
        "help": "number of removals of GPU instances that fail next (default: 0)",
    },
    "--done": {"action": "store_true", "help": "what fails is done all the same"},
    "--gi": {"metavar": "N", "type": int, "help": "ID of the MIG GPU instance"},
    "--ci": {"metavar": "N", "type": int, "help": "ID of the compute instance in it"},
    "--count": {"metavar": "N", "type": int, "default": 1, "help": "number of errors (default: 1)"},
    "--double-bit": {"action": "store_true", "help": "add uncorrected errors"},
}

_TIMES: Final = frozenset({"seconds", "duration", "compute_duration", "in_use"})


def add_arguments(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add one parser per command; `command_from` reads their results."""
    for kind in get_args(AnySimCommand):
        if kind is ProcessCommand:
            continue  # its command line is one with that of processes in pods
        name, summary = str(kind.__struct_config__.tag), (kind.__doc__ or "").strip()
        parser = subparsers.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=f"example: metagpu sim {_EXAMPLES[name]}",
        )
        parser.set_defaults(command_type=kind)

        for field in msgspec.structs.fields(kind):
            option = f"--{field.name.replace('_', '-')}"
            if field.name == "change":
                changes = get_args(field.type)
                parser.add_argument(
                    "change", metavar="|".join(changes), choices=changes, help="the change"
                )
            elif option in _ARGUMENTS:
                parser.add_argument(option, **_ARGUMENTS[option])
            else:
                parser.add_argument(field.name, **_ARGUMENTS[field.name])
        # As behind `sim`; what is not given here does not replace what was given there.
        parser.add_argument(
            "--run-dir",
            metavar="DIR",
            type=Path,
            default=argparse.SUPPRESS,
            help="the folder of the daemon's control socket",
        )
        if name == "show":
            add_json(parser)
            parser.set_defaults(as_table=True)
    add_cluster_arguments(subparsers)


def command_from(args: argparse.Namespace) -> AnySimCommand | AnyClusterCommand:
    """Return the command of a parsed command line.

    Raises:
        ConfigError: an amount of memory, a time, a request or a label is not valid.
    """
    if hasattr(args, "build"):
        built: AnySimCommand | AnyClusterCommand = args.build(args)
        return built
    kind: type[AnySimCommand] = args.command_type
    values = {name: getattr(args, name) for name in kind.__struct_fields__}

    try:
        for name in _TIMES & values.keys():
            values[name] = float(Duration.parse(values[name]))
    except ValueError as error:
        raise ConfigError(str(error), ConfigReason.INVALID_VALUE) from None

    return kind(**values)
