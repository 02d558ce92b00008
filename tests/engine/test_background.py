import asyncio
import threading

from semel.engine.background import BackgroundTask, BackgroundThread

PATIENCE = 10.0


def test_a_thread_that_outlived_its_stop_ends_although_another_is_started() -> None:
    background, busy, ended = BackgroundThread("test"), threading.Event(), [threading.Event(), threading.Event()]
    begun = [threading.Event(), threading.Event()]
    waiting = iter(range(2))

    def work() -> None:
        number, stopping = next(waiting), background.stopping
        begun[number].set()
        busy.wait(PATIENCE)
        stopping.wait(PATIENCE)
        ended[number].set()

    background.start(work)
    background.start(work)  # it runs: nothing happens
    assert begun[0].wait(PATIENCE)
    background.stop(timeout=0.0)
    background.start(work)
    assert begun[1].wait(PATIENCE)
    busy.set()
    assert ended[0].wait(PATIENCE)
    assert not ended[1].is_set()
    background.stop()
    assert ended[1].is_set()


def test_a_thread_may_stop_itself() -> None:
    background, ended = BackgroundThread("test"), threading.Event()

    def work() -> None:
        background.stop()
        ended.set()

    background.start(work)
    assert ended.wait(PATIENCE)
    background.stop()


def test_a_task_is_cancelled_when_the_time_is_over() -> None:
    async def use() -> list[str]:
        background, ends = BackgroundTask("test"), []

        async def work() -> None:
            try:
                await background.stopping.wait()
                ends.append("stopped")
                await asyncio.sleep(PATIENCE)
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        await background.stop()  # nothing runs
        background.start(work)
        background.start(work)
        await asyncio.sleep(0)
        await background.stop(timeout=0.01)
        return ends

    assert asyncio.run(use()) == ["stopped", "cancelled"]


def test_a_task_is_cancelled_at_once_also_if_its_caller_is_cancelled() -> None:
    async def main() -> None:
        background, ended = BackgroundTask("test"), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        background.start(work)
        await asyncio.sleep(0)
        stopping = asyncio.create_task(background.stop(timeout=0))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(main())
