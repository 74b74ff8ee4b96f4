"""What a way does between two messages, with a mail in which the test says what has come."""

import ctypes

import numpy as np
import pytest

from mpizero.comm.slots import Copies, Expected, Promised, Transfer, after, parts_of
from mpizero.comm.ways import Direct, Slots, Staged, Tools, tag
from mpizero.comm.wires import DEVICE_CHANNELS, agreed
from mpizero.errors import ArgumentError, CollectiveError
from mpizero.testing.host_runtime import HostRuntime, device_on


class Mail:
    """Hold what was posted, (verb, peer, tag, memory, then), and the messages that a probe finds."""

    def __init__(self):
        self.posted, self.come = [], {}

    def send(self, *message):
        self.posted.append(("send", *message))

    def receive(self, *message):
        self.posted.append(("receive", *message))

    def probe(self, number):
        waiting = self.come.get(number)
        return (waiting.pop(0), "message") if waiting else None

    def take(self, message, memory, then):
        self.posted.append((message, 1, 0, memory, then))


@pytest.fixture
def mail():
    return Mail()


@pytest.fixture
def device():
    runtime = HostRuntime(1, restless=0.0)
    return device_on(runtime)


@pytest.fixture
def tools(device, mail):
    return Tools(device, mail, Copies(device), Copies(device), [40] * 3, CollectiveError)


def receive(device, nbytes, peer=1, strand=0):
    return Transfer(f"receive from rank {peer}", (peer, strand), device.allocate(nbytes))


def test_a_slot_is_emptied_when_the_last_of_its_messages_has_come(tools, device, mail):
    way = Staged(tools, Slots(nbytes=100, number=1))
    transfer = receive(device, 100)
    way.receive(transfer)
    mail.come[tag(2, 0)] = [1]
    way.advance()
    announcement, *parts = mail.posted
    assert announcement[0] == "send"
    assert [part[3].nbytes for part in parts] == [40, 40, 20]
    for number, part in enumerate(parts):
        assert not tools.coming._queue
        part[3][:] = number
        part[4]()
    assert len(tools.coming._queue) == 1
    assert transfer.left == 100
    while transfer.left:
        tools.coming.advance()
    found = (ctypes.c_uint8 * 100).from_address(transfer.data.address)
    assert list(found) == [0] * 40 + [1] * 40 + [2] * 20


def test_a_slot_is_free_when_the_last_of_its_messages_has_gone(tools, device, mail):
    way = Staged(tools, Slots(nbytes=100, number=1))
    transfer = Transfer("send to rank 2", (2, 0), device.allocate(150))
    way.send(transfer)
    (_, _, _, wanted, announced) = mail.posted.pop()
    wanted[0] = 150
    announced()
    for lengths in ([40, 40, 20], [40, 10]):
        way.advance()
        while not mail.posted:
            tools.leaving.advance()
        assert [part[3].nbytes for part in mail.posted] == lengths
        parts, mail.posted = mail.posted, []
        for part in parts:
            way.advance()
            assert not tools.leaving._queue
            part[4]()
    assert transfer.left == 0


def test_pieces_of_device_pointers_follow_each_other(tools, device, mail, monkeypatch):
    """Of one message at most so many pieces are under way, and the next message of the lane comes behind."""
    monkeypatch.setattr("mpizero.comm.ways.WINDOW", 2)
    way = Direct(tools)
    first, second = receive(device, 100), receive(device, 30)
    way.receive(first)
    way.receive(second)
    lengths = []
    while mail.posted:
        assert len(mail.posted) <= 2
        _, _, _, memory, then = mail.posted.pop(0)
        lengths.append(memory.nbytes)
        then()
    assert lengths == [40, 40, 20, 30]
    assert first.left == second.left == 0


def test_lanes_take_turns_and_messages_of_a_lane_do_not(device, mail):
    promised = Promised(mail, lambda strand: strand, CollectiveError)
    sends = [Transfer(name, lane, device.allocate(25)) for name, lane in (("a", (1, 0)), ("b", (1, 0)), ("c", (2, 0)))]
    for each in sends:
        promised.add(each)
    assert promised.cut(10) is None

    def announce(number):
        _, _, _, wanted, then = mail.posted[number]
        wanted[0] = 25
        then()

    announce(1)  # not its turn before the first one
    assert promised.cut(10) is None
    announce(0)
    announce(2)
    pieces = []
    while (piece := promised.cut(10)) is not None:
        pieces.append((piece[0].name, piece[1].nbytes))
    assert pieces == [("a", 10), ("c", 10), ("a", 10), ("c", 10), ("a", 5), ("c", 5), ("b", 10), ("b", 10), ("b", 5)]


def test_lengths_that_differ_are_refused(device, mail):
    promised = Promised(mail, lambda strand: strand, CollectiveError)
    promised.add(Transfer("send to rank 1", (1, 0), device.allocate(25)))
    _, _, _, wanted, then = mail.posted[0]
    wanted[0] = 24
    with pytest.raises(CollectiveError, match="send to rank 1 must have one length on both"):
        then()


def test_pieces_are_found_for_the_first_receive_of_their_sender(device, mail):
    expected = Expected(mail, lambda strand: 100 + strand, lambda strand: 200 + strand)
    names = {}
    for name, peer, strand in (("a", 1, 0), ("b", 1, 0), ("c", 2, 0), ("d", 1, 4)):
        names[name] = receive(device, 15, peer, strand)
        expected.add(names[name])
    assert expected.find(10) is None
    mail.come = {200: [1, 2, 1, 1], 204: [1, 1]}
    found = []
    while (piece := expected.find(10)) is not None:
        found.append((next(name for name, each in names.items() if each is piece[0]), piece[1].nbytes))
    assert found == [("a", 10), ("c", 10), ("a", 5), ("b", 10), ("d", 10), ("d", 5)]


def test_tags_are_apart_and_within_what_mpi_grants():
    strands = range(3 * (DEVICE_CHANNELS + 1))
    tags = {tag(family, strand) for family in range(4) for strand in strands}
    assert len(tags) == 4 * len(strands)
    assert min(tags) > 0
    assert max(tags) <= 32767


def test_after_and_parts():
    calls = []
    one = after(3, lambda: calls.append(1))
    assert [one() or len(calls) for _ in range(3)] == [0, 0, 1]
    assert [part.nbytes for part in parts_of(np.zeros(10, np.uint8), 4)] == [4, 4, 2]


def test_pairs_agree():
    table = [["staged", "peer", "direct"], ["peer", "staged", "direct"], ["direct", "staged", "staged"]]
    assert [agreed(table, rank) for rank in range(3)] == [
        ["staged", "peer", "direct"],
        ["peer", "staged", "staged"],
        ["direct", "staged", "staged"],
    ]
    with pytest.raises(ArgumentError, match="kinds of rank 1 must be 2 of peer, direct, staged"):
        agreed([["peer", "peer"], ["peer"]], 0)
