"""Streams of changes: one source for all, and none without a stream."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from metagpu.plugins.web.changes import PERIOD, ChangeFeed
from metagpu.plugins.web.node import USAGE_TIMEOUT
from tests.rigs.waiting import becomes, skip


@dataclass
class Source:
    """A source of changes that a test triggers; `followers` counts who follows it."""

    followers: int = 0
    reported: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    async def follow(self) -> AsyncGenerator[object, None]:
        """Yield at each change."""
        self.followers += 1
        try:
            while True:
                await self.changed.wait()
                self.changed = anyio.Event()
                yield None
        finally:
            self.followers -= 1

    def report(self) -> None:
        """Count a reported change."""
        self.reported += 1


async def test_streams_share_a_source_and_none_is_followed_without_one() -> None:
    """Two streams have each change once, by one follower, who ends with the last stream."""
    source = Source()
    feed = ChangeFeed(source.follow, source.report, period=0, silence=60)

    async with anyio.create_task_group() as group:
        group.start_soon(feed.run)
        await anyio.wait_all_tasks_blocked()
        assert source.followers == 0
        for _ in range(2):
            async with aclosing(feed.stream()) as one, aclosing(feed.stream()) as two:
                firsts = [await anext(one), await anext(two)]
                await anyio.wait_all_tasks_blocked()
                assert source.followers == 1
                source.changed.set()
                seconds = [await anext(one), await anext(two)]
            assert all(
                first.startswith(b'event: change\ndata: {"at":"') for first in firsts + seconds
            )
            await anyio.wait_all_tasks_blocked()
            assert source.followers == 0
        assert source.reported == 2
        group.cancel_scope.cancel()


async def test_a_stream_that_opens_and_closes_at_once_leaves_no_follower() -> None:
    """A source is not followed for a stream that has gone before the feed looked."""
    source = Source()
    feed = ChangeFeed(source.follow, source.report, period=0)

    async with anyio.create_task_group() as group:
        group.start_soon(feed.run)
        await anyio.wait_all_tasks_blocked()
        stream = feed.stream()
        await anext(stream)
        await stream.aclose()
        await anyio.wait_all_tasks_blocked()
        assert source.followers == 0
        group.cancel_scope.cancel()


async def test_a_slow_stream_misses_no_change() -> None:
    """Changes while a stream's client is slow become one; a quiet stream has comments."""
    source = Source()
    feed = ChangeFeed(source.follow, source.report, period=0, silence=0.01)

    async def reported(count: int) -> None:
        await becomes(lambda: source.reported == count)

    async with anyio.create_task_group() as group:
        group.start_soon(feed.run)
        async with aclosing(feed.stream()) as stream:
            await anext(stream)
            for count in range(1, 4):
                source.changed.set()
                await reported(count)
            assert (await anext(stream)).startswith(b"event: change")
            assert (await anext(stream)).startswith(b": ")
        group.cancel_scope.cancel()
    assert source.reported == 3


async def test_changes_between_two_reports_are_reported_at_the_end_of_the_period() -> None:
    """The first of many changes is reported at once, all others by one report a period later."""
    source = Source()
    feed = ChangeFeed(source.follow, source.report, period=60)

    async with anyio.create_task_group() as group:
        group.start_soon(feed.run)
        async with aclosing(feed.stream()) as stream:
            await anext(stream)
            await anyio.wait_all_tasks_blocked()
            source.changed.set()
            await anext(stream)
            for _ in range(5):
                source.changed.set()
                await anyio.lowlevel.checkpoint()
            assert source.reported == 1
            skip(60)
            await anext(stream)
            assert source.reported == 2
        group.cancel_scope.cancel()


def test_what_the_server_waits_for_is_a_second_at_most() -> None:
    """A change waits for the period after the last one, and its view for NVML: a second in all."""
    assert PERIOD + USAGE_TIMEOUT <= 1
