"""Keys without effect: that the tables of formats fit the keys that are honoured."""

from collections.abc import Mapping

import msgspec
import pytest

from metagpu.compat import cnvrg, hami, nvidia_file
from metagpu.compat.keys import Unheeded

StructType = msgspec.inspect.StructType


def fields(info: msgspec.inspect.Type) -> Mapping[str, msgspec.inspect.Type]:
    """Give the keys that are honoured of a value of this type, in lists and unions too."""
    if isinstance(info, StructType):
        return {field.encode_name: field.type for field in info.fields}
    if isinstance(info, msgspec.inspect.UnionType):
        return {key: inner for member in info.types for key, inner in fields(member).items()}
    item = getattr(info, "item_type", None)
    return {} if item is None else fields(item)


@pytest.mark.parametrize("form", [cnvrg, hami, nvidia_file], ids=lambda form: form.__name__)
def test_a_key_is_honoured_or_has_a_sentence_and_not_both(form: object) -> None:
    """Each key with a sentence stands in a mapping that is read, and is not read itself."""
    table: Mapping[str, Unheeded] = form._UNHEEDED  # type: ignore[attr-defined]
    root = getattr(form, "File", None) or form._File  # type: ignore[attr-defined]

    assert all(isinstance(unheeded, Unheeded) for unheeded in table.values())
    for path in table:
        *parents, key = path.split(".")
        known = fields(msgspec.inspect.type_info(root))
        for parent in parents:
            assert parent in known, path
            known = fields(known[parent])
        assert key not in known, path


def test_variables_of_nvidia_name_keys_that_have_a_sentence() -> None:
    """A variable without effect says what the key of the same flag says."""
    assert set(nvidia_file._VARIABLES.values()) <= set(nvidia_file._UNHEEDED)
