"""The hand-written answer to Prepare, compared with the generated messages of `proto/`."""

from hypothesis import given
from hypothesis import strategies as st

from metagpu.plugins.dra.prepared_claim import PreparedDevice
from metagpu.plugins.dra.service import PrepareAnswer, encode_prepare_response
from metagpu.plugins.kubelet.pb.k8s.io.kubelet.pkg.apis.dra import v1

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
NAMES = st.lists(TEXTS, max_size=4).map(tuple)
DEVICES = st.builds(PreparedDevice, NAMES, TEXTS, TEXTS, NAMES, st.none() | TEXTS)
ANSWERS = st.dictionaries(TEXTS, TEXTS | st.lists(DEVICES, max_size=3), max_size=3)


def generated(answer: PrepareAnswer) -> v1.NodePrepareResourceResponse:
    """Return the generated message of one claim."""
    if isinstance(answer, str):
        return v1.NodePrepareResourceResponse(error=answer)
    devices = [
        v1.Device(
            request_names=list(device.requests),
            pool_name=device.pool,
            device_name=device.device,
            cdi_device_ids=list(device.cdi_names),
            share_id=device.share_id,
        )
        for device in answer
    ]
    return v1.NodePrepareResourceResponse(devices=devices)


@given(ANSWERS)
def test_answers_are_encoded_as_by_the_generated_messages(
    answers: dict[str, PrepareAnswer],
) -> None:
    """Every answer is decoded as what was answered, by the generated messages."""
    expected = {uid: generated(group) for uid, group in answers.items()}
    decoded = v1.NodePrepareResourcesResponse.parse(encode_prepare_response(answers))

    assert decoded == v1.NodePrepareResourcesResponse(claims=expected)
