"""Prove a builder: run the schedules of all ranks on symbols instead of numbers.

What is proven for one (operation, algorithm, size, root, nodes or pieces), with chunks of any length including none:

- no deadlock and no leftovers: every send is met by a receive and back, under rendezvous (a round ends when its
  messages are taken);
- both ends of a message name the same chunks, in memory of the same width ([Note: spaces] in `schedule`), and a local
  step's operands and result are of one chunk;
- nothing is read before it is written, and nothing is overwritten while it is being sent;
- the input survives, or, in place, is overwritten by results only;
- every rank ends with the results that the operation promises: each the sum of every rank's part exactly once, in the
  declared order, as the very same expression on all ranks, rounded, and for a mean divided, once; where nothing is
  summed, the part of the one rank that it comes from;
- for a barrier: that every rank has heard, directly or not, of all others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpizero.collectives.registry import OPERATIONS, Algorithm, Operation
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.collectives.order import Expr

__all__ = ["ScheduleError", "Simulated", "simulate"]


class ScheduleError(AssertionError):
    """Say how a schedule is wrong."""


@dataclass
class Simulated:
    """Hold what a simulation found."""

    results: list[dict[int, Expr]]
    """Per rank, the expression in each chunk of OUT."""
    messages: list[int]
    """Per rank, the messages that it sent."""
    rounds: int
    """The most rounds of any rank."""


@dataclass
class _Rank:
    """Hold one rank's state."""

    schedule: Schedule
    memory: dict[Ref, tuple[int, Expr]]
    """What lies in each place of memory: the chunk, and the value as an expression."""
    position: int = 0
    posted: bool = False
    waiting: set[int] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)
    sent: int = 0

    @property
    def done(self) -> bool:
        """Return whether all rounds are over."""
        return self.position == len(self.schedule.rounds)


def simulate(
    algorithm: Algorithm,
    size: int,
    root: int = 0,
    *,
    in_place: bool = False,
    nodes: tuple[int, ...] = (),
    pieces: int = 1,
) -> Simulated:
    """Run every rank's schedule and check all that this module's docstring lists.

    Args:
        algorithm: which builder.
        size: number of ranks.
        root: the root of a rooted operation.
        in_place: whether IN and OUT are the same memory; in all-to-all they never are.
        nodes: the node number of each rank, for algorithms that take `nodes`; none means that all are on one node.
        pieces: in how many pieces each part is cut, for algorithms that take `pieces`.

    Raises:
        ScheduleError: if the builder is wrong; the text says rank, round and step.
    """
    schedules = [algorithm.schedule(size, rank, root, nodes=nodes, pieces=pieces) for rank in range(size)]

    def tree(chunk: int) -> Expr:
        if algorithm.order is None:
            raise ScheduleError(f"{algorithm.name} reduces and declares no order")
        return algorithm.tree(size, chunk, root, nodes=nodes, pieces=pieces)

    return _World(OPERATIONS[algorithm.operation], schedules, root, tree, in_place=in_place).run()


class _World:
    """Run all ranks of one collective."""

    def __init__(
        self,
        operation: Operation,
        schedules: list[Schedule],
        root: int,
        tree: Callable[[int], Expr],
        *,
        in_place: bool,
    ) -> None:
        self.operation, self.size, self.root, self.tree = operation, len(schedules), root, tree
        self.in_place = in_place and operation.input != "row"
        cuts = {schedule.chunks for schedule in schedules}
        if len(cuts) != 1:
            raise ScheduleError("ranks cut the buffer into different numbers of chunks")
        if operation.chunks(self.size) not in {None, *cuts}:
            raise ScheduleError(f"{operation.name} on {self.size} ranks is cut into {cuts.pop()} chunks")
        self.ranks = [
            _Rank(schedule, self._start(schedule, rank), heard={rank}) for rank, schedule in enumerate(schedules)
        ]
        self.flights: dict[tuple[int, int], deque[tuple[Send, list[Expr], set[int]]]] = {}
        self.promises: dict[int, Expr] = {}

    def run(self) -> Simulated:
        """Advance ranks until all are done or none can move."""
        while not all(rank.done for rank in self.ranks):
            moved = [self._advance(rank) for rank in range(self.size)]
            if not any(moved):
                raise ScheduleError(f"deadlock: {', '.join(self._stuck())}")
        self._check_results()
        return Simulated(
            [dict(cell for place, cell in rank.memory.items() if place.space is Space.OUT) for rank in self.ranks],
            [rank.sent for rank in self.ranks],
            max(len(rank.schedule.rounds) for rank in self.ranks),
        )

    def _stuck(self) -> list[str]:
        """Say where each rank waits, and the messages that nobody takes."""
        places = [f"rank {rank} in round {state.position}" for rank, state in enumerate(self.ranks) if not state.done]
        flights = [f"{source} sends to {target}" for (source, target), queue in self.flights.items() if queue]
        return places + flights

    def _start(self, schedule: Schedule, rank: int) -> dict[Ref, tuple[int, Expr]]:
        """Return the memory of a rank before the collective; every value is that rank's own part."""
        space = Space.OUT if self.operation.input == "root" else Space.IN
        chunks = self._chunks(self.operation.input, rank, schedule.chunks)
        return {self._place(Ref(space, chunk)): (chunk, rank) for chunk in chunks}

    def _chunks(self, kind: str, rank: int, chunks: int) -> range:
        """Return the chunks that a rank puts in or gets, of an operation's `input` or `output` kind."""
        if kind in {"root", "source"} and rank != self.root:
            return range(0)
        if kind == "chunk":
            return range(rank, rank + 1)
        if kind == "row":
            return range(rank * self.size, (rank + 1) * self.size)
        return range(rank, chunks, self.size) if kind == "column" else range(chunks)

    def _place(self, ref: Ref) -> Ref:
        """Return a name for the bytes of a ref: a slot holds one chunk at a time; in place, IN and OUT are the same."""
        if ref.space is Space.RAW or ref.space is Space.ACC:
            return ref if ref.chunk == 0 else Ref(ref.space, 0, ref.slot)
        return Ref(Space.OUT if self.in_place else ref.space, ref.chunk)

    def _advance(self, rank: int) -> bool:
        """Post the rank's round, take what has arrived, finish the round if it is complete; return whether it moved."""
        state = self.ranks[rank]
        if state.done:
            return False
        round_ = state.schedule.rounds[state.position]
        moved = not state.posted
        if not state.posted:
            self._post(rank, state, round_)
        for index in sorted(state.waiting):
            message = round_.messages[index]
            if isinstance(message, Recv) and self._take(rank, state, message, round_, index):
                state.waiting.discard(index)
                moved = True
        if state.waiting or not self._sends_taken(rank, round_):
            return moved
        for step in round_.local:
            self._local(rank, state, step)
        state.position, state.posted = state.position + 1, False
        return True

    def _post(self, rank: int, state: _Rank, round_: Round) -> None:
        state.posted = True
        sending = {self._place(ref) for step in round_.messages if isinstance(step, Send) for ref in step.refs}
        targets = [self._place(ref) for step in round_.messages if isinstance(step, Recv) for ref in step.refs]
        if len(set(targets)) != len(targets) or sending & set(targets):
            raise ScheduleError(f"rank {rank} round {state.position}: memory is received into while it is in use")
        for index, step in enumerate(round_.messages):
            if isinstance(step, Send):
                values = [self._read(rank, state, ref) for ref in step.refs]
                self.flights.setdefault((rank, step.peer), deque()).append((step, values, set(state.heard)))
                state.sent += 1
            else:
                state.waiting.add(index)

    def _take(self, rank: int, state: _Rank, step: Recv, round_: Round, index: int) -> bool:
        """Receive a message if it is this receive's turn among those of the same peer."""
        earlier = [i for i in state.waiting if i < index and round_.messages[i].peer == step.peer]
        queue = self.flights.get((step.peer, rank))
        if earlier or not queue:
            return False
        sent, values, heard = queue.popleft()
        if [ref.chunk for ref in sent.refs] != [ref.chunk for ref in step.refs]:
            raise ScheduleError(f"rank {rank} round {state.position}: {step} is met by {sent}")
        for source, target, value in zip(sent.refs, step.refs, values, strict=True):
            if (source.space is Space.ACC) != (target.space is Space.ACC):
                raise ScheduleError(f"rank {rank} round {state.position}: widths of {source} and {target} differ")
            self._write(rank, state, target, value, final=self._is_final(target.chunk, value))
        state.heard |= heard
        return True

    def _sends_taken(self, rank: int, round_: Round) -> bool:
        return not any(self.flights.get((rank, step.peer)) for step in round_.messages if isinstance(step, Send))

    def _local(self, rank: int, state: _Rank, step: Copy | Reduce) -> None:
        where = f"rank {rank} round {state.position}"
        dst, *sources = step
        if any(ref.chunk != dst.chunk for ref in sources):
            raise ScheduleError(f"{where}: {step} mixes chunks")
        if dst.space is Space.RAW and (isinstance(step, Reduce) or step.src.space is Space.ACC):
            raise ScheduleError(f"{where}: a partial result in RAW would be rounded before its time")
        if any(self._is_finished(state, ref) for ref in sources):
            raise ScheduleError(f"{where}: {step} takes a final result, which would be divided twice in a mean")
        value: Expr
        if isinstance(step, Copy):
            value = self._read(rank, state, step.src)
            self._write(rank, state, step.dst, value, final=self._is_final(step.dst.chunk, value))
            return
        value = (self._read(rank, state, step.left), self._read(rank, state, step.right))
        self._write(rank, state, step.dst, value, final=self._is_final(step.dst.chunk, value))

    def _read(self, rank: int, state: _Rank, ref: Ref) -> Expr:
        self._check_bounds(rank, state, ref)
        chunk, value = state.memory.get(self._place(ref), (None, -1))
        if chunk != ref.chunk:
            raise ScheduleError(f"rank {rank} round {state.position}: {ref} is read before it is written")
        if ref.space is Space.IN and value != rank:
            raise ScheduleError(f"rank {rank} round {state.position}: {ref} no longer holds the rank's own input")
        return value

    def _write(self, rank: int, state: _Rank, ref: Ref, value: Expr, *, final: bool) -> None:
        self._check_bounds(rank, state, ref)
        if ref.space is Space.IN:
            raise ScheduleError(f"rank {rank} round {state.position}: {ref} is input and was written")
        if ref.space is Space.OUT and not final:
            raise ScheduleError(f"rank {rank} round {state.position}: {ref} gets the partial result {value}")
        state.memory[self._place(ref)] = (ref.chunk, value)

    def _check_bounds(self, rank: int, state: _Rank, ref: Ref) -> None:
        """Hold a ref to the memory that the operation and the schedule's slots give."""
        schedule = state.schedule
        if ref.space is Space.RAW or ref.space is Space.ACC:
            held = ref.slot < (schedule.raw_slots if ref.space is Space.RAW else schedule.acc_slots)
        else:
            kind = self.operation.input if ref.space is Space.IN else self.operation.output
            held = kind == "whole" or ref.chunk in self._chunks(kind, rank, schedule.chunks)
        if not held or not 0 <= ref.chunk < schedule.chunks:
            raise ScheduleError(f"rank {rank} round {state.position}: {ref} is outside the rank's memory")

    def _is_finished(self, state: _Rank, ref: Ref) -> bool:
        """Return whether a ref holds a result that has been rounded and divided: one that was in OUT."""
        if not self.operation.reduces or self.size == 1 or ref.space not in {Space.OUT, Space.RAW}:
            return False
        return state.memory.get(self._place(ref)) == (ref.chunk, self._promised(ref.chunk))

    def _is_final(self, chunk: int, value: Expr) -> bool:
        return self.operation.name == "barrier" or value == self._promised(chunk)

    def _promised(self, chunk: int) -> Expr:
        """Return the expression that chunk's result has to be; one object, so that comparing is quick."""
        if chunk not in self.promises:
            self.promises[chunk] = self._order_of(chunk)
        return self.promises[chunk]

    def _order_of(self, chunk: int) -> Expr:
        if self.operation.reduces:
            return self.tree(chunk)
        if self.operation.input in {"root", "source"}:
            return self.root
        return chunk // self.size if self.operation.input == "row" else chunk

    def _check_results(self) -> None:
        for rank, state in enumerate(self.ranks):
            if self.operation.output == "token":
                if len(state.heard) != self.size:
                    raise ScheduleError(f"rank {rank} passes the barrier without having heard of all ranks")
                continue
            for chunk in self._chunks(self.operation.output, rank, state.schedule.chunks):
                _, got = state.memory.get(Ref(Space.OUT, chunk), (chunk, None))
                if got != self._promised(chunk):
                    raise ScheduleError(f"rank {rank} ends with {got} in chunk {chunk}, not {self._promised(chunk)}")
