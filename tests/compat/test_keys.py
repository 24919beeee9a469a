"""Keys without effect: the tables of formats fit the honoured keys."""

from collections.abc import Mapping
from types import ModuleType

import msgspec
import pytest

from metagpu.compat import cnvrg, hami, nvidia_file, variables
from metagpu.compat.keys import IgnoredKey
from tests.compat.rig import FILE_STRUCTS

StructType = msgspec.inspect.StructType


def fields(info: msgspec.inspect.Type) -> Mapping[str, msgspec.inspect.Type]:
    """Return the honoured keys of a type, in lists and unions too."""
    if isinstance(info, StructType):
        return {field.encode_name: field.type for field in info.fields}
    if isinstance(info, msgspec.inspect.UnionType):
        return {key: inner for member in info.types for key, inner in fields(member).items()}
    item = getattr(info, "item_type", None)
    return {} if item is None else fields(item)


@pytest.mark.parametrize("form", [cnvrg, hami, nvidia_file], ids=lambda form: form.__name__)
def test_a_key_is_honoured_or_has_a_note_and_not_both(form: ModuleType) -> None:
    """A key with a note stands in a mapping that is read, and is not read itself."""
    table: Mapping[str, IgnoredKey] = form.IGNORED_KEYS
    root = FILE_STRUCTS[form]

    assert all(isinstance(ignored, IgnoredKey) for ignored in table.values())
    for path in table:
        *parents, key = path.split(".")
        known = fields(msgspec.inspect.type_info(root))
        for parent in parents:
            assert parent in known, path
            known = fields(known[parent])
        assert key not in known, path


def test_variables_of_nvidia_name_keys_that_have_a_note() -> None:
    """A variable without effect has the note of its flag's key."""
    assert set(variables.VARIABLES_OF_FLAGS.values()) <= set(nvidia_file.IGNORED_KEYS)
