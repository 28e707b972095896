"""Helpers of the file store: everything is done once, nobody waits for a helper that is stuck."""

import threading
import time

import pytest

from kvtiers.storage.file.crew import Crew


def test_every_item_is_done_once_and_before_the_call_returns():
    crew = Crew(3)
    for _ in range(50):
        done = []
        crew.each(done.append, range(20), meanwhile=lambda: done.append("meanwhile"))  # noqa: B023
        assert sorted(map(str, done)) == sorted([*map(str, range(20)), "meanwhile"])
    crew.close()


def test_what_follows_is_done_by_the_caller_in_order_and_after_the_work():
    crew = Crew(3)
    release = [threading.Event() for _ in range(6)]
    worked, followed = [], []

    def work(item):
        assert release[item].wait(10)
        worked.append(item)

    def then(item):
        assert item in worked
        followed.append((item, threading.current_thread()))

    def let_go():
        # The first one ends last of the three that are begun; then the others in their order.
        for item in (2, 1, 0, 3, 4, 5):
            release[item].set()

    crew.each(work, range(6), meanwhile=let_go, then=then)
    assert followed == [(item, threading.current_thread()) for item in range(6)]
    crew.close()


def test_what_follows_needs_no_helper():
    crew = Crew(0)
    order = []
    crew.each(
        lambda item: order.append(("work", item)),
        range(3),
        then=lambda item: order.append(("then", item)),
    )
    assert order == [(step, item) for item in range(3) for step in ("work", "then")]


def test_an_exception_in_what_follows_is_raised_when_nothing_runs_any_more():
    crew = Crew(2)
    running = []

    def work(item):
        running.append(item)
        time.sleep(0.001)
        running.remove(item)

    def then(item):
        if item == 3:
            raise RuntimeError("this one")

    with pytest.raises(RuntimeError, match="this one"):
        crew.each(work, range(50), then=then)
    assert not running
    crew.close()


def test_one_item_or_none_needs_no_helper():
    crew = Crew(3)
    threads = []
    crew.each(lambda item: threads.append(threading.current_thread()), [1])
    crew.each(lambda item: threads.append(threading.current_thread()), [])
    assert threads == [threading.current_thread()]
    crew.close()


def test_callers_do_without_helpers_that_are_stuck_with_another_call():
    crew = Crew(2)
    entered, go_on = threading.Barrier(4), threading.Event()

    def get_stuck(item):
        entered.wait(10)
        assert go_on.wait(10)

    stuck = threading.Thread(target=crew.each, args=(get_stuck, range(3)))
    stuck.start()
    entered.wait(10)  # the stuck caller and both helpers
    done = []
    crew.each(done.append, range(5), meanwhile=lambda: None)
    assert done == list(range(5))
    go_on.set()
    stuck.join()
    crew.close()


def test_calls_leave_nothing_behind_where_no_thread_is_to_be_had(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    crew = Crew(3)
    done = []
    for _ in range(10):
        crew.each(done.append, range(4))
    assert done == list(range(4)) * 10
    assert crew._rounds == []


@pytest.mark.parametrize("followed_up", [False, True])
@pytest.mark.parametrize("bad_item", range(6))
def test_an_exception_is_raised_when_nothing_runs_any_more(bad_item, followed_up):
    crew = Crew(2)
    running = []

    def work(item):
        running.append(item)
        if item == bad_item:
            running.remove(item)
            raise RuntimeError("this one")
        running.remove(item)

    followed = []
    with pytest.raises(RuntimeError, match="this one"):
        crew.each(work, range(6), then=followed.append if followed_up else None)
    assert not running
    assert bad_item not in followed
    done = []
    crew.each(done.append, range(6))
    assert sorted(done) == list(range(6))
    crew.close()
