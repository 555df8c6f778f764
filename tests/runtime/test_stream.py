from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.runtime.stream import Stream, visits
from headwater.types import Task

TASKS = [Task(id=str(i), prompt="?") for i in range(5)]


@given(count=st.integers(1, 8), seed=st.integers(0, 3))
def test_every_epoch_visits_every_task_once(count, seed):
    drawn = [visit for step in range(10) for visit in visits(TASKS, step, count, seed)]
    for epoch in range(len(drawn) // 5):
        assert sorted(task.id for task, e in drawn if e == epoch) == ["0", "1", "2", "3", "4"]


def test_the_order_is_a_function_of_seed_and_step():
    assert visits(TASKS, 3, 4, 0) == visits(TASKS, 3, 4, 0)
    assert [v for s in range(5) for v in visits(TASKS, s, 5, 0)] != [
        v for s in range(5) for v in visits(TASKS, s, 5, 1)
    ]


def test_a_step_larger_than_the_data_goes_into_the_next_epoch():
    assert [epoch for _, epoch in visits(TASKS, 0, 12, 0)] == [0] * 5 + [1] * 5 + [2] * 2


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_no_step_starts_before_the_weights_are_within_the_lag(max_lag):
    version, lags = [0], []

    async def produce(step):
        lags.append(step - version[0])
        return []

    stream = Stream(produce, first=0, steps=8, max_lag=max_lag)
    for step, _ in stream:
        time.sleep(0.01)  # let the producer run ahead as far as it may
        version[0] = step + 1
        stream.reached(step + 1)
    stream.close()
    assert len(lags) == 8
    assert max(lags) == max_lag


def test_a_failure_ahead_surfaces_in_the_loop():
    async def produce(step):
        if step == 2:
            raise ValueError("environment on fire")
        return []

    stream = Stream(produce, first=0, steps=5, max_lag=5)
    with pytest.raises(ValueError, match="on fire"):
        list(stream)
    stream.close()


def test_close_ends_a_producer_that_waits():
    async def produce(step):
        return []

    stream = Stream(produce, first=0, steps=100, max_lag=1)
    iterator = iter(stream)
    next(iterator)
    stream.close()
    assert "rollout" not in [t.name for t in threading.enumerate()]
