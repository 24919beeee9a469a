"""Repeated questions to nodes, while one of them gives no answer."""

from collections.abc import Iterable, Sequence
from typing import Any

import anyio

from metagpu.core.errors import ClusterError
from metagpu.kubectl.agent_pods import AgentPod
from metagpu.kubectl.repeated import RepeatedQuestions
from metagpu.kubectl.viewer import NodeAnswer

A, B = (AgentPod(node, "kube-system", node, 1, ready=True) for node in "ab")
REPORT: dict[str, Any] = {"gpus": []}


class SlowViewer:
    """A viewer for which `b` gives no answer, and later answers once it is `released`."""

    def __init__(self) -> None:
        self.deadline = 5.0
        self.asked: list[str] = []
        self.released = anyio.Event()
        self.error: ClusterError | None = None

    async def ask(
        self, _: str, agents: Iterable[AgentPod], deadline: float | None = None
    ) -> Sequence[NodeAnswer]:
        """Answer for `a` at once; a question with a deadline waits for `b`."""
        found = []
        for it in agents:
            self.asked.append(it.node)
            if it is B and deadline is None:
                found.append(NodeAnswer("b", problem="no answer within 5 s"))
                continue
            if it is B:
                await self.released.wait()
                if self.error:
                    raise self.error
            found.append(NodeAnswer(it.node, REPORT))
        return found


async def test_a_silent_node_delays_the_first_look_alone() -> None:
    """The node is asked once at a time, and its row returns once it has answered."""
    viewer: Any = SlowViewer()
    questions = RepeatedQuestions(viewer)
    silent = NodeAnswer("b", problem="no answer within 5 s")
    with anyio.fail_after(20):
        for _ in range(3):
            assert await questions.ask([A, B]) == [NodeAnswer("a", REPORT), silent]
            await anyio.wait_all_tasks_blocked()
        assert viewer.asked.count("b") == 2
        viewer.released.set()
        await anyio.wait_all_tasks_blocked()
        for _ in range(2):
            found = await questions.ask([A, B])
            assert found[0] == NodeAnswer("a", REPORT)
            assert found[1].node == "b"
        assert viewer.asked.count("b") == 3  # after the answer, as every other node


async def test_an_error_of_a_later_question_is_the_nodes() -> None:
    """A question in the background ends no look, and nodes that have gone are forgotten."""
    viewer: Any = SlowViewer()
    questions = RepeatedQuestions(viewer)
    viewer.error = ClusterError("away", message="away")
    viewer.released.set()
    with anyio.fail_after(20):
        for _ in range(2):
            await questions.ask([A, B])
            await anyio.wait_all_tasks_blocked()
        assert (await questions.ask([A, B]))[1] == NodeAnswer("b", problem="away")
        assert await questions.ask([A]) == [NodeAnswer("a", REPORT)]
