"""Schedules: the pictures of the docstring, the proof for every size, the figures they were made for."""

import dataclasses

import pytest

from common import schedule as module
from common.schedule import (
    QUEUES,
    Costs,
    Message,
    Op,
    Step,
    build,
    check,
    draw,
    messages,
    needs,
    peak_held,
    play,
    programs,
    rules,
    simulate,
    unit_costs,
    utilisation,
)

ONE_F_ONE_B = """
rank 0   F0 F1 F2 f0 b0  - f1 b1  -  . B0  - f2 b2  - F3 B1  - f3 b3  -  . B2  -  .  . B3  -
rank 1    . F0 f0 F1 f1  . b0  - B0  - F2 f2 b1  - B1  - F3 f3 b2  - B2  - b3  - B3  -  .  .
"""
ZERO_BUBBLE = """
rank 0   F0 F1 F2 f0 b0 w0 f1 b1 B0 w1 B1 W0 F3 f2 b2 W1 w2  . f3 b3 B2 w3 B3 W2 W3
rank 1    . F0 f0 F1 f1 b0 B0 w0 b1 B1 W0 F2 f2 w1 W1 b2 F3 f3 B2 w2 b3 B3 W2 w3 W3
"""
WITH_ENCODE = """
rank 0   F0 E0 E1 F1 f0 E2 b0 f1 b1 w0 w1 F2 E3 B0 B1 W0 f2 b2 W1 F3 B2 w2 f3 b3 W2 w3 B3 W3
rank 1   E0 E1 F0 f0 E2 F1 f1 E3 b0 b1 B0 B1 w0 w1 F2 f2 W0 W1 b2 B2 F3 f3 w2 W2 b3 B3 w3 W3
"""
FOUR_STAGES = """
rank 0   F0 F1 F2 F3  .  .  . f0 b0 f1 b1 f2 b2 f3 b3 B0 w0 B1 w1 B2 w2 B3 w3 W0 W1 W2 W3
rank 1    . F0 F1 F2 F3  . f0  . f1 b0 f2 b1 f3 b2 B0 b3 B1 w0 B2 w1 B3 w2 W0 w3 W1 W2 W3
rank 2    .  . F0 F1 F2 f0 F3 f1  . f2 b0 f3 b1 B0 b2 B1 b3 B2 w0 B3 w1 W0 w2 W1 w3 W2 W3
rank 3    .  .  . F0 f0 F1 f1 F2 f2 F3 f3 b0 B0 b1 B1 b2 B2 b3 B3 w0 W0 w1 W1 w2 W2 w3 W3
"""
FORWARD = """
rank 0   F0 F1  .  .  . f0  . f1
rank 1    . F0 F1  . f0  . f1  .
rank 2    .  . F0 f0 F1 f1  .  .
"""


def test_the_pictures_are_the_schedules():
    assert draw(build("1f1b", 2, 4)) == ONE_F_ONE_B.strip()
    assert draw(build("zero-bubble", 2, 4)) == ZERO_BUBBLE.strip()
    assert draw(build("zero-bubble", 2, 4, encode="next")) == WITH_ENCODE.strip()
    assert draw(build("zero-bubble", 4, 4)) == FOUR_STAGES.strip()
    for picture in (ONE_F_ONE_B, ZERO_BUBBLE, WITH_ENCODE):
        assert "\n".join("    " + line for line in picture.strip().splitlines()) in module.__doc__


def test_a_validation_pass_goes_down_and_up_and_an_encoding_pass_runs_to_rank_0():
    assert draw(build("forward", 3, 2)) == FORWARD.strip()
    assert draw(build("encode", 3, 2)) == "rank 0    .  . E0 E1\nrank 1    . E0 E1  .\nrank 2   E0 E1  .  ."


# ── the proof ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble"])
def test_no_schedule_deadlocks_or_holds_more_than_it_says(kind, stages):
    """Every number of stages and micro-batches; for some also with encoding, and however communicators are shared."""
    for micros in range(1, 33):
        some = micros in (1, 2, 3, 5, 8, 13, 32)
        check(build(kind, stages, micros, tries=1), tuple(QUEUES) if some else ("direction",))
        if some:
            check(build(kind, stages, micros, encode="next", tries=1))


@pytest.mark.parametrize("stages, micros", [(2, 5), (3, 8), (5, 7)])
@pytest.mark.parametrize("encode", [None, "this", "next"])
@pytest.mark.parametrize("kind", ["1f1b", "zero-bubble", "forward", "encode"])
def test_no_schedule_deadlocks_with_uneven_costs(kind, encode, stages, micros):
    uneven = [(1.0 + 0.3 * (r % 3), 0.7 + 0.2 * (r % 2)) for r in range(stages)]
    held = [(0.2 + r % 4, 1.0 + r % 3) for r in range(stages)]
    costs = Costs(uneven, uneven, uneven[::-1], [0.8 * (r % 3) for r in range(stages)], 0.15, held)
    for room in (1, 1.5):
        made = build(kind, stages, micros, costs, encode, room)
        check(made, tuple(QUEUES), early=1)
        check(made, early=3)


def test_the_quickest_of_all_rules_is_taken():
    ends = [
        simulate(build("zero-bubble", 3, 7, tries=n)).makespan for n in range(1, len(rules("zero-bubble", None)) + 1)
    ]
    assert ends == sorted(ends, reverse=True)


def test_every_message_is_sent_once_and_received_once_by_the_operation_that_needs_it():
    made = build("zero-bubble", 4, 6, encode="this")
    found = messages(made)
    assert len(found) == len(set(found)) == 3 * 5 * 6
    for message in found:
        assert needs(message.dst, message.op, 4, "this") == (message.src, message.op)
    for rank, steps in enumerate(programs(made)):
        done = []
        for action, what in steps:
            # A result is sent after it is made, and used after it is received.
            assert action != "send" or ("run", what.op) in done
            need = needs(rank, what, 4, "this") if action == "run" else None
            assert need is None or need[0] == rank or ("recv", Message(need[0], rank, what)) in done
            done.append((action, what))


# ── the checker finds what is wrong ──────────────────────────────────────────────────────────────────────────────────


def test_two_neighbours_that_both_send_first_are_found():
    right, left = Message(0, 1, Op("F", "down", 0)), Message(1, 0, Op("F", "up", 1))
    crossed = [
        [Step("send", right), Step("recv", left), Step("run", left.op)],
        [Step("send", left), Step("recv", right), Step("run", right.op)],
    ]
    # On one communicator each send waits behind its own side's queue; on one for each direction they pass.
    with pytest.raises(ValueError, match="deadlock: rank 0 waits at f1; rank 1 waits at F0"):
        play(crossed, QUEUES["pair"])
    play(crossed, QUEUES["direction"])


def test_receives_in_another_order_than_the_sends_are_found():
    first, second = (Message(0, 1, Op("F", "down", m)) for m in (0, 1))
    sender = [Step("run", first.op), Step("send", first), Step("run", second.op), Step("send", second)]
    receiver = [Step("recv", second), Step("recv", first), Step("run", first.op), Step("run", second.op)]
    with pytest.raises(ValueError, match="deadlock: rank 1 waits at F0"):
        play([sender, receiver], QUEUES["direction"])


def test_an_impossible_order_a_missing_operation_and_too_much_memory_are_found():
    made = build("1f1b", 2, 4)
    swapped = [list(ops) for ops in made.ops]
    swapped[1].insert(0, swapped[1].pop(swapped[1].index(Op("B", "up", 0))))
    with pytest.raises(ValueError, match="schedule stops: rank 0 waits at f0 for f0 of rank 1; rank 1 waits at b0"):
        check(dataclasses.replace(made, ops=swapped))
    with pytest.raises(ValueError, match="rank 1 does not do every operation"):
        check(dataclasses.replace(made, ops=[made.ops[0], made.ops[1][:-1]]))
    eager = [sorted(ops, key=lambda op: "FfbB".index(str(op)[0])) for ops in made.ops]
    with pytest.raises(ValueError, match="rank 0 holds activations of 8, more than 4"):
        check(dataclasses.replace(made, ops=eager))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="gpipe"):
        build("gpipe", 2, 2)


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind, stages, micros, percent",
    [
        ("1f1b", 4, 8, 80.0),  # (p-1)/(m+p-1) would leave 72.7: the folded order fills holes with the other chunk
        ("1f1b", 4, 16, 88.9),
        ("1f1b", 2, 8, 92.3),
        ("zero-bubble", 4, 8, 94.1),
        ("zero-bubble", 4, 16, 97.0),
        ("zero-bubble", 2, 8, 98.0),
        ("zero-bubble", 8, 32, 96.0),
    ],
)
def test_utilisation(kind, stages, micros, percent):
    assert round(100 * utilisation(build(kind, stages, micros)), 1) == percent


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_zero_bubble_is_idle_little_more_than_the_way_down(stages):
    """6 M is all the work of a rank; the last rank cannot start before P - 1 ticks have passed."""
    for micros in (2 * stages, 4 * stages):
        made = build("zero-bubble", stages, micros)
        assert simulate(made).makespan <= 6 * micros + stages + 1
        assert max(peak_held(made)) == 2 * stages


def sdxl_costs(stages=4):
    """TFLOP of SDXL at 1024², spread evenly: 20.23 for a UNet step, 4.99 to encode a picture and its caption."""
    unet = [(20.23 / stages / 6,) * 2] * stages
    return Costs(unet, unet, unet, [4.99 / stages] * stages)


def test_encoding_in_holes_is_cheaper_than_encoding_first():
    def end(kind, encode=None):
        return simulate(build(kind, 4, 8, sdxl_costs(), encode)).makespan

    first = end("encode") + end("1f1b")
    assert 62 < first < 66
    assert end("1f1b", "next") < 56.5
    assert end("zero-bubble", "next") < 52.2
    assert end("zero-bubble", "this") < end("encode") + end("zero-bubble")
    assert first / end("zero-bubble", "next") > 1.2
    assert utilisation(build("zero-bubble", 4, 8, sdxl_costs(), "next")) > 0.965


def test_busy_shares_and_spans_add_up():
    costs = unit_costs(4, hop=0.25)
    made = build("zero-bubble", 4, 8, costs)
    timing = simulate(made)
    assert len(timing.spans) == 4 * 6 * 8
    assert timing.busy == pytest.approx([48 / timing.makespan] * 4)
    slower = simulate(made, unit_costs(4, hop=0.5))
    assert slower.makespan > timing.makespan
