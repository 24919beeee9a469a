"""The status API of a whole agent, asked as viewers ask: through the API server's pod proxy."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from metagpu.cli.arguments import parser
from metagpu.cli.options import cluster_of, resolve_environment, status_api_of
from metagpu.core.config.errors import ConfigError
from metagpu.core.errors import ClusterError
from metagpu.plugins.cluster.client import KubeClient
from metagpu.plugins.cluster.settings import AUDIENCE, VIEWER, ClusterSettings, Feature
from metagpu.plugins.cluster.token_review import ACCESS_REVIEWS, DENIED, REMEMBERED, REVIEWS
from metagpu.plugins.http.address import ListenAddress
from metagpu.sim.apiserver.server import SimApiServer
from metagpu.sim.kubelet.kubelet import SimPod
from tests.plugins.cluster.rig import open_client_at
from tests.plugins.http.rig import asked
from tests.rigs.agent import METAGPU, QUICK, Scene, agent_at_work
from tests.rigs.waiting import skip, until

NODE = "gpu-1"
SYSTEM = "kube-system"


@dataclass
class StatusScene:
    """An agent with its status API, behind a simulated API server."""

    node: Scene
    server: SimApiServer
    client: KubeClient
    port: int

    async def get(self, path: str, token: str) -> Mapping[str, Any]:
        """Ask by the pod proxy."""
        proxy = f"/api/v1/namespaces/{SYSTEM}/pods/agent:{self.port}/proxy{path}"
        return await self.client.call("GET", proxy, headers={"Metagpu-Token": token})

    def token(self, name: str = VIEWER, audience: str = AUDIENCE, namespace: str = SYSTEM) -> str:
        """Issue a token of a ServiceAccount."""
        return self.server.tokens.issue(namespace, name, [audience])

    @property
    def reviews(self) -> int:
        """The number of reviews of tokens."""
        return sum(request.target == REVIEWS for request in self.server.requests)

    @property
    def questions(self) -> list[Mapping[str, Any]]:
        """The specs of the reviews of access."""
        return [
            request.body["spec"]
            for request in self.server.requests
            if request.target == ACCESS_REVIEWS
        ]


@asynccontextmanager
async def serving(tmp_path: Path, config: str = QUICK) -> AsyncIterator[StatusScene]:
    """Run an agent with two GPUs, and its pod at the API server."""
    server = SimApiServer()
    server.add_node(NODE)
    server.add_pod(SYSTEM, "agent", NODE)["status"]["podIP"] = "127.0.0.1"
    async with server.running():
        settings = ClusterSettings(
            NODE, server.kubeconfig(tmp_path), features=frozenset({Feature.CORDON, Feature.PODS})
        )
        async with (
            agent_at_work(
                tmp_path,
                config=config,
                cluster_settings=settings,
                status_address=ListenAddress("127.0.0.1", 0),
            ) as live_scene,
            open_client_at(server.kubeconfig(tmp_path)) as client,
        ):
            await live_scene.until(20, 20)
            api = live_scene.agent.status_api
            assert api is not None
            scene = StatusScene(live_scene, server, client, 0)
            token = scene.token()  # one, since new tokens are limited

            async def answers() -> bool:
                if (port := api.server.port) == 0:
                    return False
                scene.port = port
                try:
                    await scene.get("/api/v1/usage", token)
                except ClusterError as error:
                    return error.status != 503
                return True

            await until(answers, deadline=30)
            yield scene


async def test_a_viewer_gets_status_and_usage(tmp_path: Path) -> None:
    """A viewer's token opens both reports, and is reviewed once; commands are in neither."""
    async with serving(tmp_path) as scene:
        await scene.node.kubelet.admit(SimPod.single("alice", {METAGPU: 3}))
        await scene.node.wait_holders()
        token, before = scene.token(), scene.reviews
        status = await scene.get("/api/v1/status", token)
        usage = await scene.get("/api/v1/usage", token)

        assert scene.reviews == before + 1
        assert status["node"] == usage["node"]
        assert [lease["holder"] for lease in status["leases"]] == ["default/alice (main)"]
        assert status["offers"][METAGPU]["free"] == 17
        [container] = usage["containers"]
        assert (container["pod"], container["gpus"][0]["processes"]) == ("alice", 0)


async def test_nobody_else_gets_anything(tmp_path: Path) -> None:
    """No token, another audience's or an invented one opens the port.

    What does not even claim to be a viewer's token costs the API server nothing.
    """
    async with serving(tmp_path) as scene:
        before = scene.reviews
        for token in (
            "",
            "a.b.c",
            scene.token(audience="https://kubernetes.default.svc"),
        ):
            with pytest.raises(ClusterError) as refused:
                await scene.get("/api/v1/status", token)
            assert refused.value.status == 403
        assert scene.reviews == before

        invented = scene.token()
        del scene.server.tokens.issued[invented]
        with pytest.raises(ClusterError, match="does not accept this token"):
            await scene.get("/api/v1/status", invented)
        assert scene.reviews == before + 1

        code, _, body = await asked(scene.port, "/api/v1/status")  # from any pod of the cluster
        assert (code, "a token for metagpu.io/status is needed" in body) == (403, True)


async def test_an_account_without_the_right_is_refused_until_it_is_bound(tmp_path: Path) -> None:
    """A token of any account is asked about; the refusal says what to bind.

    A no is remembered for seconds only, so who has bound the role waits no longer.
    """
    async with serving(tmp_path) as scene:
        account = f"system:serviceaccount:team-a:{VIEWER}"
        token, before = scene.token(namespace="team-a"), scene.reviews
        for _ in range(2):
            with pytest.raises(ClusterError) as refused:
                await scene.get("/api/v1/status", token)
            assert refused.value.status == 403
            assert (
                f"user {account} may not get nodestatuses.metagpu.io {NODE}: "
                "bind the ClusterRole metagpu-node-status to it"
            ) in refused.value.message
        assert scene.reviews == before + 1
        assert scene.questions[-1] == {
            "user": account,
            "uid": f"uid of {account}",
            "groups": ["system:serviceaccounts", "system:authenticated"],
            "extra": {"authentication.kubernetes.io/credential-id": ["JTI=1"]},
            "resourceAttributes": {
                "verb": "get",
                "group": "metagpu.io",
                "version": "v1",
                "resource": "nodestatuses",
                "name": NODE,
            },
        }

        scene.server.tokens.readers[account] = {"another-node"}  # by resourceNames
        skip(DENIED)
        with pytest.raises(ClusterError, match=f"nodestatuses.metagpu.io {NODE}"):
            await scene.get("/api/v1/status", token)
        scene.server.tokens.readers[account] = {NODE}
        skip(DENIED)
        assert await scene.get("/api/v1/status", token)


async def test_a_right_that_is_withdrawn_ends_within_a_minute(tmp_path: Path) -> None:
    """A token that opened the port opens nothing once the account is no longer bound."""
    async with serving(tmp_path) as scene:
        token = scene.token()
        await scene.get("/api/v1/status", token)
        scene.server.tokens.readers.clear()
        assert await scene.get("/api/v1/status", token)  # remembered
        skip(REMEMBERED)
        with pytest.raises(ClusterError, match="may not get nodestatuses"):
            await scene.get("/api/v1/status", token)


async def test_a_review_that_fails_is_no_refusal(tmp_path: Path) -> None:
    """A viewer whose right cannot be reviewed is told so, and asked about again."""
    async with serving(tmp_path) as scene:
        token = scene.token()
        scene.server.denied.append(("POST", ACCESS_REVIEWS))
        with pytest.raises(ClusterError, match=r"could not be reviewed: .*cannot post") as refused:
            await scene.get("/api/v1/status", token)
        assert refused.value.status == 503
        scene.server.denied.clear()
        assert await scene.get("/api/v1/status", token)


async def test_what_is_remembered_of_tokens_is_bounded(tmp_path: Path) -> None:
    """Tokens without end leave a bounded memory, and no old one in it."""
    async with serving(tmp_path) as scene:
        api = scene.node.agent.status_api
        assert api is not None
        reviewer = api._tokens
        for _ in range(20):
            skip(5)
            for _ in range(10):
                await scene.get("/api/v1/usage", scene.token())
        assert len(reviewer._known) <= 130  # type: ignore[attr-defined]


async def test_a_token_that_outlives_its_right_by_far_is_refused(tmp_path: Path) -> None:
    """A viewer's token of more than two hours, or without an end, opens nothing, unreviewed."""
    async with serving(tmp_path) as scene:
        before = scene.reviews
        for life in (7201, None):
            token = scene.server.tokens.issue(SYSTEM, VIEWER, [AUDIENCE], life=life)
            with pytest.raises(ClusterError, match="create one without --duration") as refused:
                await scene.get("/api/v1/status", token)
            assert refused.value.status == 403
        assert scene.reviews == before
        token = scene.server.tokens.issue(SYSTEM, VIEWER, [AUDIENCE], life=7200)
        assert await scene.get("/api/v1/status", token)


async def test_invented_tokens_cost_few_reviews(tmp_path: Path) -> None:
    """A flood of invented tokens is limited here, and a known viewer's token still opens."""
    async with serving(tmp_path) as scene:
        known = scene.token()
        await scene.get("/api/v1/usage", known)
        api, now = scene.node.agent.status_api, anyio.current_time()
        assert api is not None
        api._tokens._clock = lambda: now  # type: ignore[attr-defined]  # the limit does not rise
        before, statuses = scene.reviews, []
        for _ in range(60):
            invented = scene.token()
            del scene.server.tokens.issued[invented]
            with pytest.raises(ClusterError) as refused:
                await scene.get("/api/v1/usage", invented)
            statuses.append(refused.value.status)
        assert scene.reviews - before < 20
        assert statuses[-1] == 503
        assert await scene.get("/api/v1/usage", known)


def test_the_status_api_needs_an_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an API server nobody could review tokens: the option says what to give."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    args = parser().parse_args(["run", "--status-api", ":9440"])
    resolve_environment(args, {})
    with pytest.raises(ConfigError, match="also give --node-name"):
        status_api_of(args, cluster_of(args))
