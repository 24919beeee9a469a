"""Repeated questions to nodes: the silent ones delay none but the first look."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

from metagpu.core.errors import MetagpuError
from metagpu.kubectl.agent_pods import AgentPod
from metagpu.kubectl.viewer import USAGE, ClusterViewer, NodeAnswer

_LEAST: Final = 5.0
"""Seconds at least for a question in the background, which goes on during looks alone."""


class RepeatedQuestions:
    """Asks for the usage of nodes again and again, silent ones in the background.

    The first look waits for all nodes. All looks are of one event loop; it may rest between them.
    """

    def __init__(self, viewer: ClusterViewer) -> None:
        self._viewer = viewer
        self._silent: dict[str, NodeAnswer] = {}
        self._questions: dict[str, asyncio.Task[NodeAnswer]] = {}

    async def ask(self, agents: Iterable[AgentPod]) -> Sequence[NodeAnswer]:
        """Return the answers by the node's name: of silent nodes, the last.

        Raises:
            ClusterError: the API server does not answer.
        """
        by_node = {it.node: it for it in agents}
        self._silent = {node: it for node, it in self._silent.items() if node in by_node}
        for node in self._questions.keys() - by_node.keys():
            self._questions.pop(node).cancel()
        for node in self._silent.keys() - self._questions.keys():
            self._questions[node] = asyncio.create_task(self._ask_late(by_node[node]))

        others = [it for node, it in by_node.items() if node not in self._silent]
        answers = list(await self._viewer.ask(USAGE, others))
        for node, last in self._silent.items():
            done = self._questions[node].done()
            answers.append(self._questions.pop(node).result() if done else last)
        self._silent = {it.node: it for it in answers if it.report is None}
        return sorted(answers, key=lambda it: it.node)

    async def _ask_late(self, agent: AgentPod) -> NodeAnswer:
        try:
            deadline = max(self._viewer.deadline, _LEAST)
            [answer] = await self._viewer.ask(USAGE, [agent], deadline)
        except MetagpuError as error:
            return NodeAnswer(agent.node, problem=str(error))
        return answer
