"""The page in Chromium, with views of a test's own: what it draws, how smoothly, and for whom."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from metagpu.core.reports.schema.status import StatusReport
from metagpu.display.status import show_status
from metagpu.plugins.http.address import HttpTiming
from metagpu.plugins.web.server import WebServer
from tests.rigs.reported import complete
from tests.rigs.waiting import becomes
from tests.web import views
from tests.web.browser import AXE_REPORT, DESKTOP, LOOPBACK, PHONE, Opened, opened, served

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
SCREENSHOTS = "METAGPU_SCREENSHOTS"
"""Environment variable: whether the pictures of docs/images are taken again."""
LARGEST_IMAGE = 150_000
SOON_MS = 30_000
CHANGES = 6
CHANGE_MS = 300
"""CPU time of one change of 16 crowded GPUs, scripts and layout; a busy machine takes a third."""
FRAME_MS = 50
"""Of half of all frames, on a machine that runs other tests beside."""
TASK_MS = 200
"""CPU time of the longest task of the page's thread; it takes half of that on a busy machine."""
VIEWS = {"cluster": views.cluster_view, "pod": views.pod_view}
TOKEN = "a-viewers-token"  # noqa: S105 - the test's own

FOCUSED = "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"
DRAWN = "(count) => document.querySelectorAll('#gpu-15 button.cut').length === count"
WATCH_FRAMES = """() => {
    window.frames_ms = [];
    let before = performance.now();
    const step = (now) => { window.frames_ms.push(now - before); before = now;
        requestAnimationFrame(step); };
    requestAnimationFrame(step);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["node", "cluster", "pod", "refused"])
async def test_axe_finds_no_violation(browser: "Browser", axe: str, kind: str, scheme: str) -> None:
    """axe-core has nothing to say against a node, a cluster or the form for a token."""
    view = VIEWS.get(kind, views.node_view)()
    async with served(view) as server:
        port = server.server.port
        # The policy has no exception for a test: axe enters past it.
        async with opened(browser, port, scheme=scheme, bypass_csp=True) as tab:
            if kind == "refused":
                await tab.page.route("**/api/**", lambda route: route.fulfill(status=403, json={}))
                await tab.page.reload()
                await tab.page.wait_for_selector("#access")
                tab.complaints.clear()
            else:
                await tab.live()
            await tab.run(axe)
            assert await tab.run(AXE_REPORT) == []


async def _cpu_ms(chromium: "CDPSession") -> float:
    """Return the CPU time that the page's thread has spent."""
    metrics = await chromium.send("Performance.getMetrics")
    seconds: float = next(
        metric["value"] for metric in metrics["metrics"] if metric["name"] == "TaskDuration"
    )
    return 1000 * seconds


async def test_sixteen_gpus_of_a_thousand_shares_stay_smooth(browser: "Browser") -> None:
    """Changes of a crowded node cost little CPU, and move neither focus nor scrolling."""
    async with served(views.crowded_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        await tab.page.locator("#gpu-9 button.cut").nth(4).focus()
        await tab.run("() => scrollTo(0, 500)")
        before = await tab.run(FOCUSED), await tab.run("() => scrollY")
        await tab.run(WATCH_FRAMES)
        chromium = await tab.page.context.new_cdp_session(tab.page)
        await chromium.send("Performance.enable", {"timeDomain": "threadTicks"})
        spent = await _cpu_ms(chromium)
        for number in range(CHANGES):
            server.view = views.crowded_view(pods=50 + number % 3)
            server.change()
            await anyio.sleep(0.3)
        spent = await _cpu_ms(chromium) - spent
        frames = sorted(await tab.run("() => window.frames_ms"))
        assert 0 < spent / CHANGES < CHANGE_MS, spent
        assert frames[len(frames) // 2] < FRAME_MS, frames[-10:]
        assert (await tab.run(FOCUSED)).split(":")[0] == before[0].split(":")[0]
        assert await tab.run("() => scrollY") == before[1]
        assert await tab.run("() => document.querySelectorAll('*').length") < 10_000


async def test_no_change_takes_the_page_for_long(browser: "Browser") -> None:
    """Changes of a crowded node are drawn in short tasks: keys and scrolling come in between.

    Counted is the CPU time of each task, which other programs do not stretch.
    """
    async with served(views.crowded_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        await browser.start_tracing(page=tab.page, categories=["toplevel"])
        try:
            for number in range(CHANGES):
                server.view = views.crowded_view(pods=50 + number % 3)
                server.change()
                await tab.page.wait_for_function(DRAWN, arg=50 + number % 3)
        finally:
            trace = json.loads(await browser.stop_tracing())
    tasks = _task_times(trace["traceEvents"])
    assert len(tasks) > CHANGES
    assert 0 < tasks[-1] < TASK_MS, tasks[-10:]


def _task_times(events: Sequence[Mapping[str, Any]]) -> Sequence[float]:
    """Return the CPU milliseconds of each task of the page's thread, the longest last."""
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    return sorted(
        event.get("tdur", 0) / 1000  # a task at an end of the trace has none
        for event in events
        if event["name"] == "ThreadControllerImpl::RunTask"
        and (event["pid"], event["tid"]) in threads
    )


async def test_text_stays_text(browser: "Browser") -> None:
    """A name or a reason with HTML in it is shown as it is, and nothing of it runs."""
    node = views.NodeView(views.HOSTILE)
    hostile = f"{views.HOSTILE}<script>alert(2)</script>"
    node.gpu(
        views.A100,
        [(f"lab/{views.HOSTILE.replace(' ', '')}", views.METAGPU, 40, 0.5)],
        healthy=False,
        reason=hostile,
        product=hostile,
        pool=hostile,
    )
    node.status["remarks"] = [{"reason": hostile, "gpu": None, "text": hostile}]
    node.status["configuration"]["error"] = hostile
    events = [views.event(1, "error", hostile, hostile, node=node.name)]
    waiting = [{"namespace": hostile, "pod": hostile, "reason": hostile, "text": hostile}]
    for kind in ("node", "cluster"):
        view = views.view(kind, [node.as_node()], events=events, waiting=waiting)
        async with served(view) as server, opened(browser, server.server.port) as tab:
            await tab.live()
            assert hostile in await tab.page.inner_text("#problems")
            assert hostile in await tab.page.inner_text("#events")
            assert hostile in await tab.page.inner_text("#remarks")
            assert await tab.page.locator("img").count() == 1
            assert await tab.page.locator("script").count() == 1


async def test_problems_are_in_the_words_of_status(
    browser: "Browser", capsys: pytest.CaptureFixture[str]
) -> None:
    """Each problem that `metagpu status` prints is in the list of what needs attention."""
    node = views.NodeView("troubled")
    node.gpu(views.A100, faults=[], cordon={"reason": "fan", "since": views.ago(5), "reset": False})
    reported = {"holder": "lab/ana (main)", "reason": "what the report says"}
    node.status |= {
        "configuration": {"error": "line 3", "misfits": ["GPU 0: no MIG"]},
        "competingPlugins": {views.METAGPU: "other.sock"},
        "registrationProblems": {views.METAGPU: "refused"},
        "endedTasks": {"health": "a mistake"},
        **{key: [reported] for key in ("lostDevices", "leaseDifferences", "mixedRequests")},
        "unreadableGpus": [{"index": 7, "reason": "GPU 7 is lost", "since": views.ago(1)}],
        "dra": {"driver": "gpu.metagpu.io", "problem": "no socket"},
        "cdi": {"problem": "no file", "noLibraries": "no ldcache"},
        "mgctl": {"inPods": True, "problem": "no folder"},
        "cluster": {
            "problem": "no route",
            "features": {"labels": "forbidden", "taint": ""},
            "nodeDifferences": {views.METAGPU: "99, not 100"},
            "resourceSlices": {"problem": "denied", "contested": {views.METAGPU: "gpu"}},
            "competingPlugins": [{"program": "NVIDIA", "pod": "a/b", "contested": ["x/y"]}],
        },
    }
    status = node.as_node()["status"]
    show_status(complete({**status, "gpus": [], "leases": []}, StatusReport))
    printed = capsys.readouterr().out.split(" RESOURCE")[0].strip().splitlines()
    assert len(printed) > 15
    async with (
        served(views.view("node", [node.as_node()])) as server,
        opened(browser, server.server.port) as tab,
    ):
        await tab.live()
        shown = await tab.page.inner_text("#problems")
        assert [line for line in printed if line not in shown] == []
        assert "cordoned: fan since" in shown


async def test_processes_without_a_share_are_named_by_their_memory(browser: "Browser") -> None:
    """Memory that no container with a share uses is a reason of its GPU, and of no other."""
    node = views.NodeView("used")
    for _ in range(2):
        node.gpu(views.A100, [("lab/ana", views.METAGPU, 50, 0.5)])
    node.usage["unauthorized"] = 2
    node.usage["gpus"][1]["usedMiB"] += 3072
    async with (
        served(views.view("node", [node.as_node()])) as server,
        opened(browser, server.server.port) as tab,
    ):
        await tab.live()
        problems = await tab.page.inner_text("#problems")
        assert problems.startswith("GPU 1")
        assert "processes without a share use 3.0 GiB" in problems
        assert "used without a share" in await tab.page.inner_text("#gpu-1")
        assert "without a share" not in await tab.page.inner_text("#gpu-0")


async def test_a_problem_of_a_node_is_shown_once(browser: "Browser") -> None:
    """The cluster's page names a lost device above; the node's row has its own silence alone."""
    node, silent = views.NodeView("gpu-1"), views.NodeView("gpu-2")
    node.gpu(views.A100)
    lost = {"holder": "lab/ana (main)", "podUid": "u", "devices": ["MIG-1"], "fix": "delete it"}
    node.status["lostDevices"] = [{**lost, "reason": "container main holds MIG-1, gone"}]
    nodes = [node.as_node(), silent.as_node(problem="no answer")]
    async with (
        served(views.view("cluster", nodes)) as server,
        opened(browser, server.server.port) as tab,
    ):
        await tab.live()
        assert "MIG-1" in await tab.page.inner_text("#problems")
        rows = await tab.page.inner_text("#nodes")
        assert "MIG-1" not in rows
        assert "no answer" in rows


async def test_there_is_a_page_without_gpus(browser: "Browser") -> None:
    """No GPU, no node and no answer are drawn in words; nothing moves for who wants that."""
    empty, silent = views.NodeView("empty"), views.NodeView("silent").as_node(problem="no answer")
    for view, text in (
        (views.view("node", [empty.as_node()]), "No pod holds a share."),
        (views.view("node", [silent]), "no answer"),
        (views.view("cluster", []), "0 nodes"),
    ):
        async with (
            served(view) as server,
            opened(browser, server.server.port, reduced_motion="reduce") as tab,
        ):
            await tab.live()
            assert text in await tab.page.inner_text("main")
            moving = "() => [...document.querySelectorAll('*')].map((it) => getComputedStyle(it))"
            moving += ".filter((it) => it.transitionProperty !== 'none').length"
            assert await tab.run(moving) == 0


async def test_the_keyboard_is_enough(browser: "Browser") -> None:
    """Tab reaches each bar, arrows its cuts, Enter marks a pod everywhere; focus is visible."""
    async with served(views.node_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        keyboard = tab.page.keyboard
        await keyboard.press("Tab")
        assert await tab.run("() => document.activeElement.className") == "skip"
        assert await tab.run("() => document.activeElement.getBoundingClientRect().left") >= 0
        await keyboard.press("Enter")
        reached: list[str] = []
        while len(reached) < 40:
            await keyboard.press("Tab")
            reached.append(await tab.run(FOCUSED))
            outline = await tab.run("() => getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", reached[-1]
            if reached[-1].startswith("vision/train-resnet"):
                break
        assert reached[-1].startswith("vision/train-resnet (main): 50 of 100 metagpu"), reached
        await keyboard.press("ArrowRight")
        assert (await tab.run(FOCUSED)).startswith("lab/notebook-ana")
        assert await tab.page.inner_text("#hint") == await tab.run(FOCUSED)
        await keyboard.press("End")
        assert (await tab.run(FOCUSED)).startswith("lab/notebook-ben")
        await keyboard.press("Enter")
        pressed = tab.page.locator("[aria-pressed=true]")
        assert await pressed.count() == 2  # the cut, and the pod's row
        await keyboard.press("Tab")
        assert (await tab.run(FOCUSED)).startswith(
            "3g.40gb finetune-7b: nlp/finetune-7b (main)"
        )  # the bar of the next GPU
        await keyboard.press("Escape")
        assert await pressed.count() == 0


async def test_mig_devices_lie_on_their_slices(browser: "Browser") -> None:
    """A MIG device is as wide as its slices and begins at its own; free slices are numbered."""
    async with served(views.node_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        boxes = await tab.run(
            """() => [...document.querySelectorAll('#gpu-1 .slices > li')].map((it) => {
                const whole = it.parentElement.getBoundingClientRect();
                const box = it.getBoundingClientRect();
                return [it.innerText, Math.round(8 * (box.left - whole.left) / whole.width),
                    Math.round(8 * box.width / whole.width)]; })"""
        )
        assert boxes == [
            ["3g.40gb finetune-7b", 0, 4],
            ["2g.20gb rerank", 4, 2],
            ["1g.10gb idle", 6, 1],
            ["7", 7, 1],
        ]
        device = server.view["nodes"][0]["status"]["gpus"][1]["devices"][2]
        device |= {"idle": False, "holder": "nlp/finetune-7b (main)"}
        server.change()
        await tab.page.locator("#gpu-1 button", has_text="1g.10gb").wait_for(timeout=SOON_MS)
        owners = tab.page.locator("#gpu-1 .owners .owner")
        assert await owners.all_inner_texts() == ["mig owns it"]
        assert "offered by mig now, by timeslice in 12 s" in await tab.page.inner_text("#gpu-3")
        held_back = tab.page.locator("#offers tr", has_text="cnvrg.io/metagpu")
        assert (await held_back.inner_text()).split("\t")[-1] == "20"


async def test_a_pod_sees_its_own_part(browser: "Browser") -> None:
    """The page of a pod has its name, its parts, limits and faults, and no word of others."""
    async with served(views.pod_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        assert await tab.page.title() == "Pod lab/notebook-ana - metagpu"
        assert await tab.page.locator("button.cut").count() == 2
        assert await tab.page.locator("#gpu-0 .bar li").all_inner_texts() == ["notebook-ana", ""]
        cut = await tab.page.locator("#gpu-0 button.cut").bounding_box()
        whole = await tab.page.locator("#gpu-0 .bar").bounding_box()
        assert cut
        assert whole
        assert abs(cut["width"] / whole["width"] - 0.2) < 0.01
        problem = await tab.page.inner_text("#problems")
        assert "XID 79" in problem
        assert "since" in problem
        events = await tab.page.locator("#events li b").all_inner_texts()
        assert events == ["GPUUnhealthy", "GPUSharesGranted"]
        assert "5.5 of 47.6 GiB" in await tab.page.inner_text("#figures")
        assert "2 processes" in await tab.page.inner_text("#gpu-0")
        assert "43.6 of 47.6 GiB, limit 48.0 GiB" in await tab.page.inner_text("#pods")
        assert "over its limit" in await tab.page.inner_text("#pods")
        text = await tab.page.inner_text("main")
        for foreign in ("free", "not available", "Idle", "pool", "Resources", "Pods"):
            assert foreign not in text
        server.view = views.view("pod", [{**server.view["nodes"][0], "problem": "no daemon"}])
        server.view["nodes"][0] |= {"status": None, "usage": None}
        server.change()
        await tab.page.locator("#problems", has_text="no daemon").wait_for(timeout=SOON_MS)
        assert await tab.page.inner_text("h1") == "Pod lab/notebook-ana"


async def test_a_pod_sees_the_slices_of_its_own_mig_device(browser: "Browser") -> None:
    """The slices of the pod's MIG device are at their place; the others are blank."""
    async with served(views.mig_pod_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        texts = await tab.page.locator("#gpu-0 .slices > li").all_inner_texts()
        assert texts == ["", "", "", "", "2g.20gb notebook-ana", "", ""]
        cut = await tab.page.locator("#gpu-0 button.cut").bounding_box()
        whole = await tab.page.locator("#gpu-0 .slices").bounding_box()
        assert cut
        assert whole
        assert abs((cut["x"] - whole["x"]) / whole["width"] - 0.5) < 0.02
        assert abs(cut["width"] / whole["width"] - 0.25) < 0.02
        problem = await tab.page.inner_text("#problems")
        assert "MIG device 2g.20gb@4: XID 94" in problem
        assert "since" in problem


async def test_a_missing_right_is_one_line(browser: "Browser") -> None:
    """Without the right to list Pods, one line stands in place of the pods that wait."""
    lacking = "pods that wait are not shown: pods is forbidden"
    shown = {**views.cluster_view(), "waiting": [], "lacking": lacking}
    async with served(shown) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        assert await tab.page.inner_text("#waiting-part p") == lacking
        assert not await tab.page.locator("#waiting-table").is_visible()
        assert await tab.page.locator("#nodes h3").count() == 9


async def test_a_nodes_own_page_says_where_waiting_pods_are(browser: "Browser") -> None:
    """A daemon does not know them; its page names the commands that do."""
    async with served(views.node_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        text = await tab.page.inner_text("#waiting-part p")
        assert "kubectl metagpu why POD" in text
        assert not await tab.page.locator("#waiting-table").is_visible()


async def test_the_cluster_is_filtered(browser: "Browser") -> None:
    """Filters leave the nodes that have such a GPU, stay in the address, and open a node."""
    async with served(views.cluster_view()) as server, opened(browser, server.server.port) as tab:
        await tab.live()
        nodes = tab.page.locator("#nodes h3")
        assert await nodes.count() == 9
        assert "no answer within 5 s" in await tab.page.inner_text("#nodes")
        await tab.page.select_option("#filter-model", "L40S")
        assert await nodes.all_inner_texts() == ["gpu-c-04", "gpu-c-07"]
        await tab.page.select_option("#filter-health", "needs attention")
        assert await nodes.all_inner_texts() == ["gpu-c-04"]
        assert await tab.page.inner_text("#nodes-title") == "1 of 9 nodes"
        await tab.page.reload()
        await tab.live()
        assert await nodes.all_inner_texts() == ["gpu-c-04"]
        await tab.page.click("#nodes a")
        await tab.page.locator("h1", has_text="Node gpu-c-04").wait_for(timeout=SOON_MS)
        assert await tab.page.locator(".gpu").count() == 4
        await tab.page.focus(".skip")
        await tab.page.keyboard.press("Enter")  # and the address stays that of the node
        assert await tab.run("() => document.activeElement.id") == "main"
        assert await tab.page.inner_text("h1") == "Node gpu-c-04"
        await tab.page.click("#back")
        await tab.page.locator("h1", has_text="Cluster").wait_for(timeout=SOON_MS)
        await tab.page.select_option("#filter-health", "")
        await tab.page.select_option("#filter-model", "")
        await tab.page.select_option("#filter-profile", "2g.20gb")
        assert await nodes.count() == 4
        await tab.page.select_option("#filter-profile", "")
        await tab.page.select_option("#filter-namespace", "lab")
        assert "lab/sweep-15" in await tab.page.inner_text("#waiting")
        assert "nlp/train-70b" not in await tab.page.inner_text("#waiting")
        await tab.run("() => { location.hash = 'toString=1' }")  # a name of no filter
        await tab.frame()
        assert await nodes.count() == 9


class OneToken:
    """A check that knows one viewer's token, or why it can tell nothing."""

    problem, token = "", TOKEN

    async def run(self) -> None:
        """Hold nothing."""

    async def check(self, token: str, source: str) -> str:  # noqa: ARG002 - as the protocol has it
        """Return why another token gives no access."""
        if self.problem:
            raise ConnectionError(self.problem)
        return "" if token == self.token else "the header metagpu-token has no viewer's token"


async def test_a_token_is_asked_for_and_kept(browser: "Browser") -> None:
    """A page that is refused asks for a token, says how to make one, and keeps a good one."""

    async def view() -> Mapping[str, Any]:
        return views.node_view()

    async def nothing() -> Any:  # noqa: ANN401 - an endless generator
        await anyio.sleep_forever()
        yield None

    tokens = OneToken()
    server = WebServer(LOOPBACK, view, nothing, tokens, HttpTiming(page_age=0.0))
    async with anyio.create_task_group() as group:
        group.start_soon(server.run)
        await becomes(lambda: server.port)
        async with opened(browser, server.port, quiet=False) as tab:
            for given in ("wrong…", f"“{TOKEN}”"):  # no header has such characters
                await tab.page.wait_for_selector("#access:not([hidden])", timeout=SOON_MS)
                assert "no viewer's token" in await tab.page.inner_text("#refusal")
                assert "metagpu.io/status" in await tab.page.inner_text("#access pre")
                await tab.page.fill("#token", given)
                await tab.page.press("#token", "Enter")
            await tab.live()
            assert await tab.page.locator(".gpu").count() == 8
            await tab.page.reload()
            await tab.live()
            tokens.problem = "the API server does not answer"
            await tab.page.reload()
            said = tab.page.locator("#connection", has_text=tokens.problem)
            await said.wait_for(timeout=SOON_MS)
            tokens.problem = ""
            await tab.live()
            tokens.token = ""  # it has expired; nothing changes meanwhile
            await tab.run("() => document.dispatchEvent(new Event('visibilitychange'))")
            await tab.page.wait_for_selector("#access:not([hidden])", timeout=SOON_MS)
            refused = (
                f"status of ({int(HTTPStatus.FORBIDDEN)}|{int(HTTPStatus.SERVICE_UNAVAILABLE)})"
            )
            assert [text for text in tab.complaints if not re.search(refused, text)] == []
        group.cancel_scope.cancel()


async def _take(tab: Opened, name: str, folder: Path, height: int) -> None:
    """Take a picture of the top of the page."""
    await tab.page.mouse.move(0, 0)
    width = await tab.run("() => innerWidth")
    clip: Any = {"x": 0, "y": 0, "width": width, "height": height}
    picture = await tab.page.screenshot(clip=clip, full_page=True, animations="disabled")
    assert 10_000 < len(picture) < LARGEST_IMAGE, f"{name}: {len(picture)} bytes"
    await anyio.Path(folder / f"{name}.png").write_bytes(picture)


@pytest.mark.parametrize(
    "picture",
    [
        ("page-light", "node", "light", DESKTOP, 780),
        ("page-dark", "node", "dark", DESKTOP, 780),
        ("page-cluster", "cluster", "light", DESKTOP, 900),
        ("page-phone", "node", "dark", PHONE, 844),
    ],
    ids=lambda value: value[0],
)
async def test_the_pictures_of_the_documentation(
    browser: "Browser", tmp_path: Path, picture: tuple[str, str, str, tuple[int, int], int]
) -> None:
    """Pictures of docs/images are small; nothing is wider than the screen."""
    name, kind, scheme, size, height = picture
    view = views.cluster_view() if kind == "cluster" else views.node_view()
    async with (
        served(view) as server,
        opened(browser, server.server.port, scheme=scheme, size=size) as tab,
    ):
        await tab.live()
        assert await tab.run("() => document.documentElement.scrollWidth <= innerWidth")
        await _take(tab, name, IMAGES if os.environ.get(SCREENSHOTS) else tmp_path, height)
        assert (IMAGES / f"{name}.png").exists()
