"""Helpers of the file store: everything is done once, nobody waits for a helper that is stuck."""

import threading

import pytest

from kvtiers.storage.file.crew import Crew


def test_every_item_is_done_once_and_before_the_call_returns():
    crew = Crew(3)
    for _ in range(50):
        done = []
        crew.each(done.append, range(20), meanwhile=lambda: done.append("meanwhile"))  # noqa: B023
        assert sorted(map(str, done)) == sorted([*map(str, range(20)), "meanwhile"])
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


@pytest.mark.parametrize("bad_item", range(6))
def test_an_exception_is_raised_when_nothing_runs_any_more(bad_item):
    crew = Crew(2)
    running = []

    def work(item):
        running.append(item)
        if item == bad_item:
            running.remove(item)
            raise RuntimeError("this one")
        running.remove(item)

    with pytest.raises(RuntimeError, match="this one"):
        crew.each(work, range(6))
    assert not running
    done = []
    crew.each(done.append, range(6))
    assert sorted(done) == list(range(6))
    crew.close()
