"""Reviews of viewers' tokens by the API server."""

import asyncio
from base64 import urlsafe_b64encode
from typing import Any, cast

import msgspec
import pytest

from metagpu.plugins.cluster import token_review
from metagpu.plugins.cluster.settings import AUDIENCE


class _ApiServer:
    async def call(self, _method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != token_review.REVIEWS:
            return {"status": {"allowed": True}}
        is_good = body["spec"]["token"].endswith(".good")
        user = {"username": "viewer"}
        return {"status": {"authenticated": is_good, "audiences": [AUDIENCE], "user": user}}


def test_invented_tokens_keep_no_accepted_viewer_out() -> None:
    """A viewer's token is reviewed again while others invent tokens, and so is a first one."""
    claims = msgspec.json.encode({"aud": [AUDIENCE], "iat": 0, "exp": 3600})
    token, now = f"a.{urlsafe_b64encode(claims).decode()}", [0.0]
    tokens = token_review.TokenReviewer(cast("Any", None), cast("Any", None), lambda: now[0])
    tokens._settings = cast("Any", type("Settings", (), {"node": "n"}))
    tokens._client = cast("Any", _ApiServer())

    async def main() -> None:
        assert await tokens.check(f"{token}.good", "viewer") == ""
        now[0] += token_review.REMEMBERED + 1
        for number in range(20):
            assert await tokens.check(f"{token}.{number}", "pod")
        with pytest.raises(ConnectionError, match="too many"):
            await tokens.check(f"{token}.more", "pod")
        assert await tokens.check(f"{token}.good", "viewer") == ""
        assert await tokens.check(f"b{token}.good", "viewer") == ""

    asyncio.run(main())
