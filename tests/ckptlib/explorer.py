"""Explores every interleaving of a few actors that run the real protocol code over one `Disk`.

How it works. An actor is an ordinary function. It is deterministic, and the world reaches it only through the results
of its steps, so what it does next is a function of the results so far: its *history*. The engine keeps the histories
of each actor in a tree of `Node` objects, and asks the real code only once for each: it runs the function from its
beginning, answers the steps of the history from the tree, and notes the step that comes after them. A state of the
exploration is a disk and one node for each actor; its successors are table look-ups.

Crashes need no transitions of their own. An actor that crashes before a step is one that never takes it; one that
crashes after a step, before it could use the result, is one that never takes the next. Schedules here are not fair:
every actor may stop for ever at every step while the others go on, and a judge looks at every state. That is a crash
before and after every operation of every actor, in every combination.

What is reduced, without losing anything that a judge can tell apart:

* Equal states are visited once. An actor that has ended is what its notes say. A call of a function that
  leaves nothing in its process but a result (the stage says which: a scan, a roll-forward, ...) is, once it has
  returned, that result: histories that differ only inside of it are one. What it did to the disk is on the disk.
* An actor's next step is taken alone where it changes nothing, is silent (leaves no note), and looks only at names
  that no other actor may still change. It commutes with everything that the others can do, and no judge sees it
  (a persistent set of one, in the words of partial-order reduction). What others may still change is what their trees
  say; whenever a tree grows, every state that was judged by the smaller tree is judged again, until nothing is new.
  An execution that was left out cannot hold the first surprise: up to there it is a permutation of one that was not.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tests.ckptlib.support.recording import Disk, Failure, Step

MESSAGE = "message:"
"""Prefix of the names of messages between ranks: no directory lists them."""

TIMEOUT = Failure(0, "no answer in time")
"""Result of a gather whose messages are not there: ranks may be slow or dead, nobody can tell."""

Notes = tuple[tuple[str, Any], ...]

_NOTHING: frozenset[str] = frozenset()
_RUNS_PER_COLLECTION = 500


class Parked(BaseException):
    """Raised into an actor's code when it has to wait. Handlers on its way up have to wait as well."""


class Violation(AssertionError):
    """A rule is broken. `trace` is a schedule that leads there."""

    def __init__(self, message: str, trace: Sequence[str] = ()) -> None:
        self.trace = tuple(trace)
        super().__init__("\n  ".join([message, *self.trace]))


@dataclass(eq=False, slots=True)
class Outcome:
    """A result of a step; equal results are one object."""

    value: Any


@dataclass(eq=False, slots=True)
class Returned:
    """The result of a whole call; stands in a history for everything inside of it.

    Attributes:
        error: what it raised instead of returning a value.
        notes: what was said inside.
        memory: of the stage, afterwards.
    """

    name: str
    value: Any
    error: Exception | None
    notes: Notes
    memory: Any


Edge = Outcome | Returned


@dataclass(eq=False, slots=True)
class Node:
    """One history of an actor.

    Attributes:
        parent, edge: the shortest way here.
        step: what it does next; None when it has ended.
        result: how it ended: its value, or the exception.
        children: what follows, by the result of the step; also by the result of a whole call that begins here.
        notes: what it has said of itself on the way here.
        place: what the stage says of where in the code it is (`Stage.place`).
        changes: what its next step has been seen to change (`Disk.difference`).
        future: what this and later steps have been seen to change.
    """

    parent: Node | None
    edge: Edge | None
    step: Step | None = None
    result: Any = None
    notes: Notes = ()
    place: Any = None
    children: dict[Edge, Node] = field(default_factory=dict)
    returns: dict[Any, Returned] = field(default_factory=dict)
    changes: frozenset[str] = _NOTHING
    future: frozenset[str] = _NOTHING

    def noted(self, name: str) -> Any:
        """The value of the last note of this name; None when there is none."""
        for key, value in reversed(self.notes):
            if key == name:
                return value
        return None


State = tuple[Any, ...]
"""A `Disk`; each actor's `Node`; and, where preemptions are counted, whose turn it is and how many are left."""


class Move(NamedTuple):
    """What an actor's next step does on a disk.

    Attributes:
        node, disk: afterwards.
        needs: the names that others must leave alone for the step to be taken alone; None: never alone.
        late: it gave up waiting for others.
    """

    node: Node
    disk: Disk
    needs: tuple[str, ...] | None = None
    late: bool = False


class Player(Protocol):
    """The world, as one run of an actor's code meets it."""

    def perform(self, step: Step) -> Any:
        """Carries out a step; returns its result."""

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Calls a function that leaves nothing in its process but what it returns or raises, which nobody changes."""

    def note(self, name: str, value: Any) -> None:
        """Keeps what the actor says of itself."""


class Stage(Protocol):
    """Where actors' code runs, with everything deterministic.

    Attributes:
        place: where in the code the running actor is, in terms that the judge knows.
        memory: everything about the running actor that the stage keeps between steps; can be hashed, and set.
    """

    place: Any
    memory: Any

    def playing(self, name: str, player: Player) -> AbstractContextManager[None]:
        """Inside it, the code of the actor of this name runs, and reaches the world through the player."""


class Judge(Protocol):
    """Says what must hold. Each method raises `Violation`."""

    def changed(self, before: Disk, after: Disk) -> None:
        """A step turned one disk into another. Called once for each pair."""

    def moved(self, state: State, actor: int, before: State) -> None:
        """A step of an actor changed the disk, left a note, or brought it to another place."""


@dataclass(eq=False)
class Actor:
    """A function, and the tree of what it does.

    Attributes:
        program: real code; it reaches the world through the stage alone.
        runs: how often it was run.
    """

    name: str
    program: Callable[[], Any]
    root: Node | None = None
    runs: int = 0
    ends: dict[tuple[Notes, bool], Node] = field(default_factory=dict)


class Explorer:
    """Explores one scenario.

    Attributes:
        states, transitions: how many there were, after `explore`.
    """

    def __init__(self, stage: Stage, actors: Sequence[Actor], judge: Judge) -> None:
        self.stage = stage
        self.actors = list(actors)
        self.judge = judge
        self.transitions = 0
        self._disks: dict[int, Disk] = {}
        self._outcomes: dict[Any, Outcome] = {}
        self._came_from: dict[State, tuple[State, int] | None] = {}
        self._judged: set[tuple[int, int]] = set()
        self._news = False

    @property
    def states(self) -> int:
        """Number of states visited."""
        return len(self._came_from)

    @property
    def disks(self) -> list[tuple[Disk, State]]:
        """Every disk that the exploration came by, with a state that has it."""
        return list({state[0]: state for state in reversed(self._came_from)}.items())

    # --- the world ---------------------------------------------------------------------------------------------------

    def disk(self, disk: Disk) -> Disk:
        """The one object for this content."""
        return self._disks.setdefault(disk.key, disk)

    def _outcome(self, value: Any) -> Outcome:
        found = self._outcomes.get(value)
        if found is None:
            found = self._outcomes[value] = Outcome(value)
        return found

    def perform(self, step: Step, disk: Disk) -> tuple[Outcome, Disk] | None:
        """Carries out a step; None when it has to wait."""
        if step.kind == "receive":
            message = disk.file(step.path)
            return None if message is None else (self._outcome(message), disk)
        if step.kind == "gather":
            messages = tuple(disk.file(path) for path in step.data)
            return self._outcome(TIMEOUT if None in messages else messages), disk
        if step.kind in ("send", "report"):
            return self._outcome(None), self.disk(disk.change(step.path, step.data))
        value, after = disk.apply(step)
        return self._outcome(value), self.disk(after)

    # --- actors ------------------------------------------------------------------------------------------------------

    def start(self, actor: Actor, disk: Disk) -> Node:
        """The empty history of an actor."""
        if actor.root is None:
            self._play(actor, [], disk)
        assert actor.root is not None
        return actor.root

    def follow(self, actor: Actor, node: Node, outcome: Outcome, disk: Disk) -> Node:
        """The history after one more result. `disk` is the disk after the step."""
        child = node.children.get(outcome)
        if child is None:
            history: list[tuple[Node, Edge]] = [(node, outcome)]
            while (parent := history[-1][0].parent) is not None:
                edge = history[-1][0].edge
                assert edge is not None
                history.append((parent, edge))
            self._play(actor, history[::-1], disk)
            child = node.children[outcome]
        return child

    def _play(self, actor: Actor, history: list[tuple[Node, Edge]], disk: Disk) -> None:
        """Runs the code along a history, then on by itself as far as it gets, and keeps what it does in the tree.

        What it does by itself is what happens when nobody else takes a step: the exploration comes by there anyway.
        """
        player = _Player(self, actor, history, disk)
        actor.runs += 1
        self._news = True
        if actor.runs % _RUNS_PER_COLLECTION == 0:
            gc.collect(0)
        try:
            with self.stage.playing(actor.name, player):
                result = actor.program()
        except Parked:
            return
        except Exception as error:
            result = error
        player.end(result)

    def solo(
        self, actor: Actor, disk: Disk, node: Node | None = None, *, until: str | None = None
    ) -> tuple[Disk, Node]:
        """Runs one actor, all others standing still, until it has left a note, has to wait or has ended."""
        node = self.start(actor, disk) if node is None else node
        while node.step is not None and (until is None or not any(name == until for name, _ in node.notes)):
            move = self._next(disk, actor, node)
            if move is None or move.late:
                break
            disk, node = move.disk, move.node
        return disk, node

    def rehearse(self, disk: Disk, marks: Sequence[str | None]) -> State:
        """Runs the actors in turns, each up to the note that stands for it (None: not at all): where to start from."""
        disk = self.disk(disk)
        nodes = [self.start(actor, disk) for actor in self.actors]
        steps = None
        while steps != [node.step for node in nodes]:
            steps = [node.step for node in nodes]
            for i, mark in enumerate(marks):
                if mark is not None:
                    disk, nodes[i] = self.solo(self.actors[i], disk, nodes[i], until=mark)
        for actor, mark, node in zip(self.actors, marks, nodes, strict=True):
            if mark is not None and not any(name == mark for name, _ in node.notes):
                raise AssertionError(f"{actor.name} never came to {mark!r}: {node.step or node.result!r}")
        return (disk, *nodes, None)

    # --- exploration -------------------------------------------------------------------------------------------------

    def explore(self, start: State, *, preemptions: int | None = None, limit: int = 20_000_000) -> None:
        """Visits every state that can be reached from where `rehearse` has come to.

        Args:
            preemptions: how often in one schedule an actor that could go on may have to stand back for another, for
                a while or, which is a crash, for ever; None: any number, which is what "exhaustive" means here.

        Raises:
            Violation: with a schedule that leads there.
            AssertionError: there are more than `limit` states.
        """
        start = (*start[:-1], None if preemptions is None else (0, preemptions))
        self._came_from = {start: None}
        self.transitions = 0
        alone: list[tuple[State, int]] = []
        queue = deque([start])
        with _no_collector():
            while queue:
                while queue:
                    state = queue.popleft()
                    moves = self._moves(state)
                    i = self._who_alone(state, moves)
                    if i is None:
                        for j in moves:
                            self._take(state, moves, j, queue)
                    else:
                        alone.append((state, i))
                        self._take(state, moves, i, queue, alone=True)
                    if self.states > limit:
                        raise AssertionError(f"more than {limit} states")
                if self._news:
                    self._news = False
                    self._foresee()
                    alone = [again for state, i in alone if (again := self._look_again(state, i, queue)) is not None]

    def _moves(self, state: State) -> dict[int, Move]:
        """The next steps of those that have one and need not wait, by position in the state."""
        disk = state[0]
        moves = {}
        for i in range(1, len(state) - 1):
            node = state[i]
            if node.step is not None:
                move = self._next(disk, self.actors[i - 1], node)
                if move is not None:
                    moves[i] = move
        return moves

    def _next(self, disk: Disk, actor: Actor, node: Node) -> Move | None:
        try:
            move: Move | None = disk.seen[node]
        except KeyError:
            move = disk.seen[node] = self._move(disk, actor, node)
        return move

    def _move(self, disk: Disk, actor: Actor, node: Node) -> Move | None:
        assert node.step is not None
        done = self.perform(node.step, disk)
        if done is None:
            return None
        outcome, after = done
        child = self.follow(actor, node, outcome, after)
        silent = len(child.notes) == len(node.notes) and child.place == node.place
        if child.step is None:
            child = actor.ends.setdefault((child.notes, isinstance(child.result, Exception)), child)
        kind = node.step.kind
        if kind == "send":
            return Move(child, after, () if silent else None)  # whoever receives it waits for it, and nobody else looks
        if after is not disk:
            changes = disk.difference(after) if kind != "report" else _NOTHING
            if not changes <= node.changes:
                node.changes |= changes
                self._news = True
            return Move(child, after)
        if not silent or outcome.value is TIMEOUT:
            return Move(child, after, late=outcome.value is TIMEOUT)
        if kind in ("receive", "gather"):
            return Move(child, after, ())
        return Move(child, after, (f"{node.step.path}/*" if kind == "list" else node.step.path,))

    def _who_alone(self, state: State, moves: dict[int, Move]) -> int | None:
        """The actor whose step is to be taken alone, if there is one."""
        for i, move in moves.items():
            needs = move.needs
            if needs is not None:
                for j in range(1, len(state) - 1):
                    if j != i and not state[j].future.isdisjoint(needs):
                        break
                else:
                    return i
        return None

    def _take(self, state: State, moves: dict[int, Move], i: int, queue: deque[State], *, alone: bool = False) -> None:
        move, turn = moves[i], state[-1]
        if turn is not None and not alone and turn[0] != i:
            turn = (i, turn[1] - (turn[0] in moves))
            if turn[1] < 0:
                return
        self.transitions += 1
        successor = (move.disk, *state[1:i], move.node, *state[i + 1 : -1], turn)
        if successor in self._came_from:
            return
        self._came_from[successor] = (state, i)
        queue.append(successor)
        before, after, node = state[0], move.disk, move.node
        if before is after and len(node.notes) == len(state[i].notes) and node.place == state[i].place:
            return
        try:
            pair = (before.key, after.key)
            if before is not after and pair not in self._judged:
                self._judged.add(pair)
                self.judge.changed(before, after)
            self.judge.moved(successor, i, state)
        except Violation as violation:
            raise Violation(str(violation), self.trace(successor)) from None

    def _look_again(self, state: State, alone: int, queue: deque[State]) -> tuple[State, int] | None:
        """Takes more steps, when the one that was taken alone turns out not to commute with what others may do.

        Returns:
            The state and whose step stands alone now; None when all have been taken.
        """
        moves = self._moves(state)
        now = self._who_alone(state, moves)
        if now == alone:
            return state, alone
        for i in moves:
            if now in (None, i):
                self._take(state, moves, i, queue, alone=now is not None)
        return None if now is None else (state, now)

    def _foresee(self) -> None:
        """Works out `Node.future` from the trees."""
        interned: dict[frozenset[str], frozenset[str]] = {}
        for actor in self.actors:
            done: set[Node] = set()
            stack = [actor.root] if actor.root is not None else []
            while stack:
                node = stack[-1]
                ahead = [child for child in node.children.values() if child not in done]
                if ahead:
                    stack.extend(ahead)
                    continue
                stack.pop()
                if node not in done:
                    done.add(node)
                    names = node.changes.union(*(child.future for child in node.children.values()))
                    node.future = interned.setdefault(names, names)

    def trace(self, state: State) -> list[str]:
        """The schedule that leads to a state, one line for each step."""
        lines: list[str] = []
        while (came := self._came_from[state]) is not None:
            before, i = came
            node, child = before[i], state[i]
            outcome = self.perform(node.step, before[0])
            value = None if outcome is None else outcome[0].value
            shown = "" if value is None or isinstance(value, bytes | tuple) else f" -> {value}"
            said = "".join(f"  [{name}]" for name, _ in child.notes[len(node.notes) :])
            lines.append(f"{self.actors[i - 1].name:10} {node.step}{shown}{said}")
            state = before
        return lines[::-1]


class _Player:
    """Answers the steps of one run: from the tree, then from the world. See `Player`."""

    def __init__(self, explorer: Explorer, actor: Actor, history: list[tuple[Node, Edge]], disk: Disk) -> None:
        self._explorer = explorer
        self._actor = actor
        self._history = history
        self._disk = disk
        self._at = 0
        self._path: list[Node] = []
        self._ways: list[tuple[Node, Edge]] = []
        """Every way to the point that the code has reached since its last step; the shortest is the last."""
        self._notes: list[tuple[str, Any]] = []
        self._parked = False

    def note(self, name: str, value: Any) -> None:
        if not self._parked:
            self._notes.append((name, value))

    def perform(self, step: Step) -> Any:
        if self._parked:
            raise Parked
        if self._at < len(self._history):
            node, edge = self._history[self._at]
            if node.step != step or isinstance(edge, Returned):
                raise AssertionError(f"{self._actor.name} is not deterministic: {node.step} before, {step} now")
            self._at += 1
            self._path.append(node)
            self._ways = [(node, edge)]
            return edge.value
        node = self._arrive(step, None)
        done = self._explorer.perform(step, self._disk)
        if done is None or done[0].value is TIMEOUT:
            self._parked = True
            raise Parked
        outcome, self._disk = done
        self._path.append(node)
        self._ways = [(node, outcome)]
        return outcome.value

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        if self._at < len(self._history):
            node, edge = self._history[self._at]
            if isinstance(edge, Returned) and edge.name == name:
                self._at += 1
                self._path.append(node)
                self._ways = [(node, edge)]
                self._notes += edge.notes
                self._explorer.stage.memory = edge.memory
                return self._value(edge)
        begun, said = len(self._path), len(self._notes)
        value, error = None, None
        try:
            value = function()
        except Exception as caught:
            error = caught.with_traceback(None)
        if len(self._path) == begun:  # it took no step
            edge = Returned(name, value, error, (), None)
        else:
            entry, notes, memory = self._path[begun], tuple(self._notes[said:]), self._explorer.stage.memory
            key = (name, repr(value), repr(error), notes, memory)
            edge = entry.returns.setdefault(key, Returned(name, value, error, notes, memory))
            self._ways.append((entry, edge))
        return self._value(edge)

    def _value(self, edge: Returned) -> Any:
        if edge.error is not None:
            raise edge.error
        return edge.value

    def end(self, result: Any) -> None:
        if self._at < len(self._history):
            raise AssertionError(f"{self._actor.name} is not deterministic: it ended early with {result!r}")
        self._arrive(None, result)

    def _arrive(self, step: Step | None, result: Any) -> Node:
        """The node for this point of the code; makes it when it is new."""
        parent, edge = self._ways[-1] if self._ways else (None, None)
        node = self._actor.root if parent is None or edge is None else parent.children.get(edge)
        if node is None:
            node = Node(parent, edge, step, result, tuple(self._notes), self._explorer.stage.place)
        if parent is None:
            self._actor.root = node
        for way, last in self._ways:
            way.children[last] = node
        return node


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """The garbage collector walks millions of tuples that hold no garbage: off for the while."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
