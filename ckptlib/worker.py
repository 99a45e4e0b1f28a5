"""The process that writes staged saves: one for each rank, started once, outliving the training process (W7).

It runs in a session of its own, so that a signal to the trainer's process group does not reach it, and ignores the
signals that ask a process to end: it ends when the connection to the trainer is closed, by whatever closed it, and
all that was handed over has been written and uploaded. When only uploads are left SIGTERM ends it: the next attempt
makes them. It is started as a new program, never forked: a process with CUDA or threads must not be.

What the two say to each other are pickles over a private socket pair; the memory files of arenas, and of messages that
are large, travel as file descriptors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import queue
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptlib.background import Job, Outcome, Supply, hand_to, run_job, take_in_hand
from ckptlib.beats import Pulse
from ckptlib.errors import StagingError, StateError
from ckptlib.staging import Arena
from ckptlib.uploader import Uploader
from ckptlib.uploading import UploadJob, UploadReport

log = logging.getLogger("ckptlib")

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which a worker does not end."""
IoPriority = Literal["normal", "low", "idle"]
"""Of the worker's writes, where the kernel's I/O scheduler knows priorities; ``idle``: when nobody else has any."""

_IO_CLASSES: Mapping[IoPriority, tuple[str, ...]] = {
    "normal": (),
    "low": ("ionice", "-c", "2", "-n", "7"),
    "idle": ("ionice", "-c", "3"),
}
IO_PRIORITIES = tuple(_IO_CLASSES)


@dataclass(frozen=True)
class NewArena:
    """Trainer to worker, with a file descriptor: an arena that jobs will refer to by this number."""

    number: int
    size: int


@dataclass(frozen=True)
class OldArena:
    """Trainer to worker: an arena that is not used any more."""

    number: int


@dataclass(frozen=True)
class Staged:
    """Trainer to worker: slice `slice` of a job is there; None: it and those after it will never be."""

    number: int
    slice: int | None


@dataclass(frozen=True)
class Consumed:
    """Worker to trainer: the first `slices` slices of a job are not read any more."""

    number: int
    slices: int


@dataclass(frozen=True)
class Written:
    """Worker to trainer: a job's arena is not read any more; its record is there, or it failed."""

    number: int


Report = Written | Consumed | Outcome | UploadReport
"""What a worker says."""


class SliceSupply:
    """`background.Supply` for the jobs of one worker, told from another thread of what is there.

    Args:
        consumed: called when slices are not read any more.
    """

    def __init__(self, consumed: Callable[[Consumed], None]) -> None:
        self._consumed = consumed
        self._there: dict[int, float] = {}
        self._change = threading.Condition()
        self._ended = False

    def staged(self, message: Staged) -> None:
        """The trainer has staged a slice, or given up."""
        with self._change:
            self._there[message.number] = -1 if message.slice is None else message.slice
            self._change.notify_all()

    def end(self) -> None:
        """The trainer is gone."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def of(self, job: Job) -> Supply:
        """The slices of a job; those of earlier ones are done with."""
        with self._change:
            self._there = {number: there for number, there in self._there.items() if number >= job.number}
        return _JobSupply(self, job.number)

    def wait(self, number: int, slice_: int) -> None:
        """See `Supply.next`."""
        self._consumed(Consumed(number, slice_))
        with self._change:
            self._change.wait_for(lambda: self._ended or not 0 <= self._there.get(number, 0) < slice_)
            there = self._there.get(number, 0)
        if there < slice_:
            raise StagingError(f"slice {slice_} of the state was never staged: the training process gave up, or ended")


@dataclass(frozen=True)
class _JobSupply:
    supply: SliceSupply
    number: int

    def next(self, number: int) -> None:
        self.supply.wait(self.number, number)


LARGE_MESSAGE = 16 * 2**10
"""Bytes. Some messages of this size fit into a socket's buffer together."""

_HEAD = struct.Struct("<Q?B")
"""Of a message: its length, whether it is in a memory file, and how many descriptors come with it."""


class Connection:
    """Messages over a stream socket; sending is safe from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, message: Any, fd: int | None = None) -> None:
        """Sends a message, and with it a file descriptor. `OSError` when nobody is there any more.

        What is large goes as a memory file: the sender never waits for a receiver that stands still, or only starts,
        and what it has sent is there when it dies.
        """
        data = pickle.dumps(message)
        by_file = len(data) > LARGE_MESSAGE
        body = os.memfd_create("ckptlib-message") if by_file else None
        try:
            if body is not None:
                with open(os.dup(body), "wb") as file:
                    file.write(data)
            fds = [one for one in (body, fd) if one is not None]
            with self._sending:
                socket.send_fds(self._socket, [_HEAD.pack(len(data), by_file, len(fds))], fds)
                if not by_file:
                    self._socket.sendall(data)
        finally:
            if body is not None:
                os.close(body)

    def receive(self) -> tuple[Any, int | None]:
        """The next message and its descriptor. `EOFError` when the other side has ended.

        Raises:
            OSError: a descriptor was lost: this process has as many open as it may.
        """
        head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, 2)
        while 0 < len(head) < _HEAD.size and (more := self._socket.recv(_HEAD.size - len(head))):
            head += more
        if len(head) < _HEAD.size:
            raise EOFError
        length, by_file, count = _HEAD.unpack(head)
        if len(fds) != count:
            for one in fds:
                os.close(one)
            raise OSError(f"{count - len(fds)} file descriptors of a message were lost")
        if by_file:
            with open(fds.pop(0), "rb") as file:
                data = os.pread(file.fileno(), length, 0)
        else:
            data = self._receive(length)
        return pickle.loads(data), fds[0] if fds else None  # noqa: S301 - our own parent or child

    def _receive(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)

    def close(self) -> None:
        """Ends the connection; the other side sees `EOFError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class WorkerProcess:
    """A worker, seen from the trainer.

    Args:
        receive: called with each `Report`, in a thread of its own; with None when the worker has ended.
        nice: added to the process priority; 19 is the lowest.
        io_priority: see `IoPriority`.

    Raises:
        StateError: the program that sets the I/O priority is not installed.
    """

    def __init__(
        self, receive: Callable[[Report | None], None], *, nice: int = 0, io_priority: IoPriority = "normal"
    ) -> None:
        prefix = _IO_CLASSES[io_priority]
        if prefix and shutil.which(prefix[0]) is None:
            raise StateError(f"io_priority={io_priority!r}: {prefix[0]} (util-linux) is not installed")
        ours, theirs = socket.socketpair()
        with theirs, _held_back():
            # The package is found where this one was, whatever the trainer did to its search path.
            path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-c", f"from ckptlib.worker import main; main({theirs.fileno()}, {nice})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # whoever reads the trainer's output need not wait for the worker
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        self._connection = Connection(ours)
        # A forked child (a data loader) must not keep the connection open when the trainer is gone.
        _connected.add(ours)
        self._receive = receive
        self._heard = False  # from a worker that is only starting there is nothing to hear, for seconds
        self._listener = threading.Thread(target=self._listen, name="ckptlib-worker-results", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def add_arena(self, number: int, arena: Arena) -> None:
        """Lets jobs refer to an arena by a number."""
        self._connection.send(NewArena(number, arena.size), arena.fd)

    def drop_arena(self, number: int) -> None:
        """Says that no job will refer to an arena any more."""
        self._connection.send(OldArena(number))

    def submit(self, job: Job) -> None:
        """Hands a job over. `OSError` when the worker has ended."""
        if not self._heard:
            hand_to(job, self.pid)
        self._connection.send(job)

    def upload(self, job: UploadJob) -> None:
        """Hands an upload over. `OSError` when the worker has ended."""
        self._connection.send(job)

    def staged(self, message: Staged) -> None:
        """Says what has become of a slice of a job. `OSError` when the worker has ended."""
        self._connection.send(message)

    def close(self, timeout: float | None) -> bool:
        """Waits until everything handed over is done and the worker has ended; False: it still works, and goes on."""
        # Only our sending half: what the worker still has to say is heard.
        with contextlib.suppress(OSError):
            self._connection._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self._listener.join(timeout)
        return True

    def _listen(self) -> None:
        try:
            while True:
                message, _ = self._connection.receive()
                self._heard = True
                self._receive(message)
        except (EOFError, OSError):
            self._process.wait()  # or it stays a zombie for as long as the trainer lives
            self._connection.close()
            self._receive(None)


_connected: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""This process's ends of its connections to workers."""


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A process that is started meanwhile gets none of these signals before it says so: its start takes seconds."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_all() -> None:
    for sock in list(_connected):
        sock.close()


os.register_at_fork(after_in_child=_close_all)  # once: what is registered stays for as long as the process lives


def _lower_priority(nice: int) -> None:
    os.nice(nice)
    # Where the kernel shares the processor between sessions first (autogroups), that counts within this one alone.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def main(fd: int, nice: int) -> None:
    """The worker: takes arenas and jobs until the trainer is gone, then finishes what it has."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s ckptlib worker %(process)d %(levelname)s %(message)s"
    )
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    if nice:
        _lower_priority(nice)
    connection = Connection(socket.socket(fileno=fd))
    arenas: dict[int, Arena] = {}
    jobs: queue.Queue[Job | OldArena | None] = queue.Queue()
    pulses: dict[int, Pulse] = {}

    supply = SliceSupply(lambda message: _tell(connection, message))
    uploader = Uploader(lambda report: _tell(connection, report))

    def read() -> None:
        """Takes messages as they come: a trainer that hands over a save never waits for the one before."""
        try:
            while True:
                message, arena_fd = connection.receive()
                if isinstance(message, NewArena):
                    assert arena_fd is not None  # else `receive` has raised
                    arenas[message.number] = Arena(message.size, arena_fd)
                elif isinstance(message, Staged):
                    supply.staged(message)
                elif isinstance(message, UploadJob):
                    uploader.submit(message)
                else:
                    if isinstance(message, Job):
                        pulses[message.number] = take_in_hand(message)
                    jobs.put(message)
        except (EOFError, OSError):
            pass
        except Exception:  # a class that this program cannot import, say
            log.exception("a message of the training process cannot be read")
        finally:
            jobs.put(None)
            supply.end()

    threading.Thread(target=read, name="ckptlib-jobs", daemon=True).start()
    while (job := jobs.get()) is not None:
        if isinstance(job, OldArena):
            if job.number in arenas:
                arenas.pop(job.number).close()
            continue
        written = functools.partial(_tell, connection, Written(job.number))
        outcome = run_job(job, arenas.get(job.arena), written, pulses.pop(job.number), supply.of(job))
        _tell(connection, outcome)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an upload that is cut short costs nothing but time
    _let_go_of_readers()
    uploader.close(None)


def _let_go_of_readers() -> None:
    """Whoever reads the trainer's errors from a pipe need not wait for uploads, which may take hours."""
    with contextlib.suppress(OSError):  # it may be closed
        if stat.S_ISFIFO(os.fstat(2).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            os.close(nowhere)


def _tell(connection: Connection, message: Report) -> None:
    """The trainer may be gone: storage knows all that matters."""
    with contextlib.suppress(OSError):
        connection.send(message)
