"""Reviews of viewers' tokens by the API server."""

from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest

from metagpu.host.programs import run_command
from metagpu.plugins.cluster import token_review
from metagpu.plugins.cluster.settings import AUDIENCE, ClusterSettings
from metagpu.sim.apiserver.server import SimApiServer
from tests.rigs.waiting import becomes


def token_of(**claims: object) -> str:
    """Build a token without its last part, as JWTs are written."""
    text = msgspec.json.encode({"aud": [AUDIENCE], "iat": 0, "exp": 3600, **claims})
    return f"a.{urlsafe_b64encode(text).decode().rstrip('=')}"


TOKEN = token_of()
GOOD = f"{TOKEN}.good"


class _ApiServer:
    authenticated = allowed = True
    audiences = (AUDIENCE,)
    name = "viewer"

    async def call(self, _method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != token_review.REVIEWS:
            return {"status": {"allowed": self.allowed}}
        is_good = self.authenticated and body["spec"]["token"].endswith(".good")
        status = {"audiences": self.audiences, "user": {"username": self.name}}
        return {"status": {"authenticated": is_good, **status}}


class _Scene:
    """A reviewer, its API server, and its clock."""

    def __init__(self) -> None:
        self.now, self.server, some = 0.0, _ApiServer(), cast("Any", None)
        self.tokens = token_review.TokenReviewer(some, some, lambda: self.now)
        self.tokens._settings = cast("Any", type("Settings", (), {"node": "n"}))
        self.tokens._client = cast("Any", self.server)

    async def check(self, token: str, source: str = "pod") -> str:
        return await self.tokens.check(token, source)

    async def invent(self, source: str = "pod") -> None:
        """Invent tokens until those of the address are reviewed no more."""
        for number in range(20):
            assert await self.check(f"{TOKEN}.{number}", source)
        with pytest.raises(ConnectionError, match="too many"):
            await self.check(f"{TOKEN}.more", source)


async def test_invented_tokens_keep_no_accepted_viewer_out() -> None:
    """Viewers' tokens are reviewed again while others invent tokens, and so is a first one."""
    scene = _Scene()
    for viewer in ("", "b"):
        assert await scene.check(f"{viewer}{GOOD}") == ""
    scene.now += token_review.LONGEST_LIFE - 1
    await scene.invent()
    for viewer in ("", "b"):
        assert await scene.check(f"{viewer}{GOOD}") == ""
    assert await scene.check(f"c{GOOD}", "another address") == ""


@pytest.mark.parametrize("lost", ["authenticated", "allowed", "never allowed", "old"])
async def test_a_token_that_lost_its_access_waits_behind_invented_ones(lost: str) -> None:
    """A token that was refused, or is older than tokens may be, has no place of its own."""
    scene = _Scene()
    scene.server.allowed = lost != "never allowed"
    assert bool(await scene.check(GOOD)) == (lost == "never allowed")
    scene.now += token_review.LONGEST_LIFE if lost == "old" else token_review.REMEMBERED
    if lost in ("authenticated", "allowed"):
        setattr(scene.server, lost, False)
        assert await scene.check(GOOD, "another address")
        scene.now += token_review.DENIED
    await scene.invent()
    with pytest.raises(ConnectionError, match="too many"):
        await scene.check(GOOD)


@pytest.mark.parametrize("allowed", [True, False])
async def test_an_answer_holds_for_a_while(*, allowed: bool) -> None:
    """The API server is not asked at each request, and a changed right counts within a minute."""
    scene = _Scene()
    scene.server.allowed = allowed
    answer = await scene.check(GOOD)
    scene.server.allowed = not allowed
    scene.now += (token_review.REMEMBERED if allowed else token_review.DENIED) - 1
    assert await scene.check(GOOD) == answer
    scene.now += 1
    assert await scene.check(GOOD) != answer


async def test_many_viewers_take_little_memory() -> None:
    """Tokens and addresses beyond some hundreds are reviewed, and not remembered."""
    scene = _Scene()
    for number in range(300):
        scene.now += 0.1
        assert await scene.check(f"{number}{GOOD}", f"address {number}") == ""
    tokens = scene.tokens
    assert {len(each) for each in (tokens._known, tokens._accepted, tokens._rates)} == {256}


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        *((f"{token_of(exp=7200, more='x' * length)}.good", "") for length in range(4)),
        (f"{token_of(exp=7201)}.good", "more than two hours"),
        (f"{token_of(exp=None)}.good", "more than two hours"),
        (f"{token_of(aud=['other'])}.good", f"not for {AUDIENCE}"),
        (f"{token_of()}.{'x' * 4096}good", "is needed"),
        ("password", "is needed"),
        ("a.b.c", "is needed"),
    ],
)
async def test_a_token_that_is_not_for_metagpu_is_refused_unasked(token: str, problem: str) -> None:
    """The refusal says what is wrong, and costs the API server nothing."""
    scene = _Scene()
    if problem:
        scene.tokens._client = None
    answer = await scene.check(token)
    assert (problem in answer, bool(answer)) == (True, bool(problem))


async def test_a_token_that_the_api_server_takes_for_another_audience_is_refused() -> None:
    """A claim is the token's own word: the API server has the last."""
    scene = _Scene()
    scene.server.audiences = ("other",)
    assert "does not accept" in await scene.check(GOOD)


async def test_the_api_server_says_who_is_a_viewer(tmp_path: Path) -> None:
    """A viewer may get the status of this very node; all that is known of the user is asked for."""
    server = SimApiServer()
    async with server.running(), anyio.create_task_group() as group:
        settings = ClusterSettings("gpu-1", server.kubeconfig(tmp_path))
        reviewer = token_review.TokenReviewer(settings, run_command)
        viewer, other, elsewhere = (
            server.tokens.issue("kube-system", name, [AUDIENCE])
            for name in ("metagpu-viewer", "other", "elsewhere")
        )
        server.tokens.readers["system:serviceaccount:kube-system:elsewhere"] = {"gpu-2"}
        with pytest.raises(ConnectionError, match="not connected to the API server yet"):
            await reviewer.check(viewer, "pod")
        group.start_soon(reviewer.run)
        await becomes(lambda: reviewer._client)

        assert await reviewer.check(viewer, "pod") == ""
        spec = server.requests[-1].body["spec"]
        user = server.tokens.review(viewer, [AUDIENCE])["user"]
        assert {key: value for key, value in spec.items() if key != "resourceAttributes"} == {
            **{key: value for key, value in user.items() if key != "username"},
            "user": user["username"],
        }
        for token in (other, elsewhere):
            assert "may not get nodestatuses.metagpu.io gpu-1" in await reviewer.check(token, "pod")
        forged = f"{viewer}x"
        assert "does not accept this token" in await reviewer.check(forged, "pod")
        server.fail(500)
        with pytest.raises(ConnectionError, match="could not be reviewed: the API server answers"):
            await reviewer.check(forged, "pod")
        group.cancel_scope.cancel()
    with pytest.raises(ConnectionError, match="not connected"):
        await reviewer.check(forged, "pod")


async def test_a_token_without_a_user_is_refused() -> None:
    """An answer without a name is nobody's."""
    scene = _Scene()
    scene.server.name = ""
    assert "does not accept" in await scene.check(GOOD)
