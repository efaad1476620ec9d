"""Channels: order, bounds, ends, and what a value that can't be sent costs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from os import dup

import pytest
import torch
from expect import raises_code

from embodrl.errors import ChannelClosed, ChannelError, ChannelTimeout, MessageError
from embodrl.scheduler.channel import MAX_CAPACITY, Channel, LocalChannel, SharedChannel


@pytest.fixture(params=[LocalChannel, SharedChannel])
def channel(request: pytest.FixtureRequest) -> Iterator[Channel]:
    made = request.param("batches", 2)
    yield made
    if isinstance(made, SharedChannel):
        made.release()


def test_values_come_in_order_as_copies(channel: Channel) -> None:
    tensor = torch.arange(3.0)
    channel.put({"a": tensor})
    channel.put("second")
    tensor.zero_()
    first = channel.get()
    assert isinstance(first, dict) and torch.equal(first["a"], torch.tensor([0.0, 1.0, 2.0]))
    assert channel.get() == "second"


def test_full_and_empty_are_reported_with_the_name(channel: Channel) -> None:
    with raises_code("channel-timeout", ChannelTimeout, "batches"):
        channel.get(0.0)
    channel.put(1)
    channel.put(2)
    with raises_code("channel-timeout", ChannelTimeout, "batches"):
        channel.put(3, 0.0)
    assert [channel.get(), channel.get()] == [1, 2]


def test_a_closed_channel_gives_what_is_in_it_and_takes_nothing(channel: Channel) -> None:
    channel.put("left")
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.put("more")
    assert channel.get() == "left"
    with pytest.raises(ChannelClosed):
        channel.get()


def test_a_value_that_cannot_be_sent_costs_no_place(channel: Channel) -> None:
    for _ in range(3):
        with pytest.raises(MessageError):
            channel.put(object())
    channel.put(1)
    channel.put(2)
    assert [channel.get(), channel.get()] == [1, 2]


@pytest.mark.parametrize("capacity", [0, MAX_CAPACITY + 1])
def test_capacities_have_bounds(capacity: int) -> None:
    with raises_code("channel", ChannelError, capacity):
        LocalChannel("batches", capacity)


def test_another_end_has_the_same_queue_and_waiting_ends_with_the_channel() -> None:
    ours = SharedChannel("batches", 1)
    theirs = SharedChannel("batches", 1, tuple(map(dup, ours.descriptors)))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            theirs.get()
        except ChannelClosed as error:
            raised.append(error)

    ours.put("over")
    assert theirs.get() == "over"
    thread = threading.Thread(target=wait)
    thread.start()
    ours.close()
    thread.join(60.0)
    assert not thread.is_alive() and len(raised) == 1
    ours.release()
    theirs.release()
