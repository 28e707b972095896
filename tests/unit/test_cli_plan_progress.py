"""Progress of a plan where there is no terminal: lines, not too many, with the time left."""

import io

from kvtiers.cli.plan_progress import LINE_SECONDS, Lines, Reached


def test_a_line_at_the_beginning_now_and_then_and_at_the_end() -> None:
    now = [100.0]
    out = io.StringIO()
    lines = Lines(out, lambda: now[0])
    lines("screening", 0, 4)
    for done, after in ((1, 1.0), (2, LINE_SECONDS), (3, LINE_SECONDS + 1), (4, 33.0)):
        now[0] = 100.0 + after
        lines("screening", done, 4)
    lines("full replays", 0, 1)
    assert out.getvalue().splitlines() == [
        "screening: 0 of 4 in 0 s",
        "screening: 2 of 4 in 30 s, about 30 s left",
        "screening: 4 of 4 in 33 s",
        "full replays: 0 of 1 in 0 s",
    ]


def test_what_an_interrupted_plan_loses_is_as_far_as_it_had_come() -> None:
    reached = Reached()
    told: list[tuple[str, int, int]] = []
    report = reached.noting(lambda *words: told.append(words))
    report("screening", 0, 65)
    assert reached.lost == "no replay had ended"
    report("screening", 3, 65)
    assert reached.lost == "screening lost after 3 of 65"
    assert told == [("screening", 0, 65), ("screening", 3, 65)]
