"""Runs a function in real processes that form one `torch.distributed` gloo group, as a launcher would.

The processes are forked from a server that has imported torch, so a launch takes tenths of a second. The store is
hosted here, outside the ranks, as torchrun's agent does it: any rank may die. Every run has a deadline, after which
all ranks are killed, stopped ones included.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 60.0
"""How long a launch may take before the function runs: a loaded machine is slow, not broken."""

context = multiprocessing.get_context("forkserver")
# The optimizers import torch's compiler on first use, which takes seconds; test modules import pytest and hypothesis.
context.set_forkserver_preload(
    ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "ckptlib", "pytest", "hypothesis"]
)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank.

    Attributes:
        value: what the function returned.
        error: what it raised; None for a rank that was killed.
        text: the traceback, for people.
        exitcode: of the process; negative: the signal that ended it.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode == 0


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0, store_file: str | None = None
) -> list[Any]:
    """What `function(rank, *args)` returned on each rank, in order. All must succeed.

    Args:
        function: found by its name in its module, as `pickle` finds it.
        timeout: seconds for the function; the start of the processes has its own allowance.
        store_file: the ranks meet over this file, not over a TCP store.

    Raises:
        AssertionError: a rank failed; with the traceback of each that did.
    """
    outcomes = try_ranks(world_size, function, *args, timeout=timeout, store_file=store_file)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert not failed, "\n".join(f"rank {o.rank} (exit code {o.exitcode}):\n{o.text}" for o in failed)
    return [outcome.value for outcome in outcomes]


Check = Callable[..., None]


def run_checks(world_size: int, checks: Sequence[Check], *args: Any, timeout: float = 90.0) -> dict[str, str]:
    """Runs several checks, each `check(rank, *args)`, one after the other in one launch.

    Returns:
        Name of each check -> what went wrong, on which ranks; empty: it passed on all.
    """
    outcomes = try_ranks(world_size, _each_check, [*checks], args, timeout=timeout)
    verdicts = {}
    for check in checks:
        name = check.__name__
        texts = [(o.value or {}).get(name, f"did not run (exit code {o.exitcode})\n{o.text}") for o in outcomes]
        verdicts[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    return verdicts


def _each_check(rank: int, checks: list[Check], args: tuple[Any, ...]) -> dict[str, str]:
    verdicts = {}
    for check in checks:
        try:
            check(rank, *args)
            verdicts[check.__name__] = ""
        except Exception:
            verdicts[check.__name__] = traceback.format_exc()
        dist.barrier()
    return verdicts


def try_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    wait_for: int | None = None,
    store_file: str | None = None,
) -> list[Outcome]:
    """As `run_ranks`, for ranks that are meant to fail, die or hang.

    Args:
        wait_for: how many ranks are waited for; the others may hang for ever and are killed then.

    Returns:
        One outcome per rank. Ranks that did not end by the deadline are killed and have no error.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    receivers: list[multiprocessing.connection.Connection] = []
    processes: list[BaseProcess] = []
    answers: dict[int, tuple[Any, BaseException | None, str]] = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(sender, store_file or store.port, rank, world_size, timeout, function, args),
                daemon=True,
            )
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        _collect(receivers, answers, wait_for or world_size, time.monotonic() + START_SECONDS + timeout)
    finally:
        for rank, process in enumerate(processes):
            if rank not in answers:
                process.kill()  # works on stopped processes too
            process.join(10.0)
        for receiver in receivers:
            receiver.close()
    outcomes = []
    for rank, process in enumerate(processes):
        value, error, text = answers.get(rank, (None, None, "no answer"))
        outcomes.append(Outcome(rank, value, error, text, process.exitcode))
        process.close()
    return outcomes


def _collect(
    receivers: list[multiprocessing.connection.Connection],
    answers: dict[int, tuple[Any, BaseException | None, str]],
    wanted: int,
    deadline: float,
) -> None:
    """Takes answers until enough ranks have answered or ended."""
    open_receivers = {receiver: rank for rank, receiver in enumerate(receivers)}
    ended = 0
    while ended < wanted and time.monotonic() < deadline:
        for ready in multiprocessing.connection.wait(list(open_receivers), timeout=0.5):
            assert isinstance(ready, multiprocessing.connection.Connection)
            rank = open_receivers.pop(ready)
            ended += 1
            try:
                answers[rank] = pickle.loads(ready.recv_bytes())
            except EOFError:  # died without a word
                continue


def _rank_main(
    sender: multiprocessing.connection.Connection,
    meeting_place: int | str,
    rank: int,
    world_size: int,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """One rank's process."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.dump_traceback_later(START_SECONDS + timeout - 1.0, file=sys.stderr)  # where it hangs
    answer: tuple[Any, BaseException | None, str]
    try:
        store: dist.Store
        if isinstance(meeting_place, str):
            store = dist.FileStore(meeting_place, world_size)
        else:
            store = dist.TCPStore("127.0.0.1", meeting_place, None, is_master=False)
        limit = datetime.timedelta(seconds=START_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        answer = (function(rank, *args), None, "")
    except BaseException as error:
        answer = (None, _portable(error), traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may wait for peers that are gone; nothing is left to clean up


def _portable(error: BaseException) -> BaseException:
    """An error that survives pickling."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
