"""The default configuration and own files, beside variables of others."""

from collections.abc import Iterator, Mapping

from metagpu.compat import cnvrg_variables, nvidia_variables
from metagpu.compat.contract import CompatNote, ConfigDraft, ConvertedConfig, Origin
from metagpu.compat.environment import note_variable, variable_origin
from metagpu.core.config.config import DEFAULT
from metagpu.core.config.document import Document

_OWN_FILE = "has no effect beside a file of metagpu, which says it itself; see docs/compat.md"


def with_variables(environment: Mapping[str, str]) -> ConvertedConfig:
    """Return the configuration of a node without a file, as variables change it.

    NVIDIA's say how a container gets its GPU, and which XIDs count; MetaGPU's switch memory
    enforcement and `mgctl`.

    Raises:
        ConfigError: a variable has a value that is not allowed.
    """
    document = Document(DEFAULT, "<default>")
    draft = ConfigDraft()
    settings = nvidia_variables.merge_settings(None, environment)
    nvidia_variables.set_flags(draft, settings, lambda _, variable: variable_origin(variable))
    switches = cnvrg_variables.read_switches(document, environment)
    cnvrg_variables.set_mgctl(draft, switches)
    draft.notes += nvidia_variables.variable_notes(environment)
    draft.notes += cnvrg_variables.variable_notes(environment)
    for variable in ("MIG_STRATEGY", "SHARED_DEVICES_ALLOCATION_POLICY"):
        if environment.get(variable, "none") not in ("", "none"):
            text = "has no effect without a file: every GPU is offered in fractions"
            draft.notes.append(note_variable(variable, text))

    for number, pool in enumerate(document.data["pools"]):
        origin = Origin(document, f"pools[{number}]")
        draft.add_pool(pool["name"], None, pool["backends"], origin, rules=switches.rules)
    return draft.finish()


def own_file_notes(environment: Mapping[str, str]) -> Iterator[CompatNote]:
    """Yield a note for each variable that would change a foreign file."""
    honoured = (*nvidia_variables.HONOURED_VARIABLES, *cnvrg_variables.HONOURED_VARIABLES)
    for variable in honoured:
        if environment.get(variable) and variable != cnvrg_variables.NODE_NAME:
            yield note_variable(variable, _OWN_FILE)
    yield from nvidia_variables.variable_notes(environment)
    yield from cnvrg_variables.variable_notes(environment)
