"""Hand-written protobuf of the answer to Prepare, for which the kubelet waits.

`proto/dra.proto` is the specification: a test compares it with the generated messages, which take
ten times as long.
"""

from collections.abc import Mapping, Sequence

from metagpu.plugins.dra.answer import PreparedDevice
from metagpu.plugins.kubelet.fast_codec import encode_field, encode_text

_FIELD_1, _FIELD_2, _FIELD_3, _FIELD_4, _FIELD_5 = b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a"

PrepareAnswer = Sequence[PreparedDevice] | str
"""The devices of a claim, or why there are none."""


def encode_prepare_response(answers: Mapping[str, PrepareAnswer]) -> bytes:
    """Encode a NodePrepareResourcesResponse: each answer by the uid of its claim."""
    return b"".join(
        encode_field(_FIELD_1, encode_text(_FIELD_1, uid) + encode_field(_FIELD_2, _answer(answer)))
        for uid, answer in answers.items()
    )


def _answer(answer: PrepareAnswer) -> bytes:
    if isinstance(answer, str):
        return encode_text(_FIELD_2, answer)
    return b"".join(encode_field(_FIELD_1, _device(it)) for it in answer)


def _device(it: PreparedDevice) -> bytes:
    share = b"" if it.share_id is None else encode_field(_FIELD_5, it.share_id.encode())
    return b"".join(
        (
            *(encode_field(_FIELD_1, request.encode()) for request in it.requests),
            encode_text(_FIELD_2, it.pool),
            encode_text(_FIELD_3, it.device),
            *(encode_field(_FIELD_4, name.encode()) for name in it.cdi_names),
            share,
        )
    )
