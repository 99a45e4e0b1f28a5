"""Semantic type x format x io mode: what is possible, what is not and why; docs and code say the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ckptlib
from ckptlib.async_options import AsyncOptions
from ckptlib.combinations import (
    FORMATS,
    IO_MODES,
    POSSIBLE,
    SEMANTIC_TYPES,
    WRITERS,
    Combination,
    check,
    constraint_on,
    nearest,
    tables,
)
from ckptlib.errors import UnsupportedError
from ckptlib.integrations.dcp import CkptWriter
from ckptlib.storage.base import Capabilities

DOCS = Path(__file__).parents[2] / "docs" / "combinations.md"
ALL = [Combination(*each) for each in itertools.product(SEMANTIC_TYPES, FORMATS, IO_MODES)]
MEMORY = Capabilities(exclusive_create=True, name="memory")
POSIX = Capabilities(exclusive_create=True, name="posix")


def test_the_six_of_the_field_and_two_more_are_possible() -> None:
    assert {str(each) for each in POSSIBLE} == {
        "LEGACY + torch + sync",
        "LOCAL + torch + sync",
        "GLOBAL + torch_dist + sync",
        "GLOBAL + torch_dist + async",
        "TORCH_DCP + torch_dcp + sync",
        "TORCH_DCP + torch_dcp + async",
        "LEGACY + torch + async",
        "LOCAL + torch + async",
    }
    assert set(WRITERS) <= set(POSSIBLE)


@pytest.mark.parametrize("combination", ALL, ids=str)
def test_every_combination_is_possible_or_has_a_reason_and_a_possible_neighbour(combination: Combination) -> None:
    constraint = constraint_on(combination)
    assert (constraint is None) == (combination in POSSIBLE)
    near = nearest(combination)
    assert near in POSSIBLE
    assert (near == combination) == (constraint is None)
    assert (near.semantic_type, near.io_mode) == (combination.semantic_type, combination.io_mode)


@pytest.mark.parametrize("combination", ALL, ids=str)
def test_the_check_passes_exactly_what_is_written_and_says_why_not(combination: Combination) -> None:
    words = (combination.semantic_type, combination.format, combination.io_mode)
    if combination in WRITERS:
        assert check(*words) == combination
        return
    with pytest.raises(UnsupportedError) as caught:
        check(*words)
    message = str(caught.value)
    assert message.startswith(f"{combination} is ")
    constraint = constraint_on(combination)
    if constraint is None:
        assert "possible, and not written by this version; written are " in message
    else:
        assert f"impossible: {constraint.text}. The nearest possible choice is {nearest(combination)}" in message


@pytest.mark.parametrize("combination", ALL, ids=str)
def test_what_is_said_to_be_written_by_save_is_and_nothing_else(combination: Combination, tmp_path: Path) -> None:
    url = str(tmp_path / "iter_0000001")
    options = {
        "semantic_type": combination.semantic_type,
        "format": combination.format,
        "io_mode": combination.io_mode,
    }
    if "ckptlib.save" in WRITERS.get(combination, ()):
        ckptlib.save({"w": torch.ones(2)}, url, iteration=1, **options)  # type: ignore[arg-type]
        found = ckptlib.inspect(url)
        assert (found.semantic_type, found.format) == (combination.semantic_type, combination.format)
    else:
        with pytest.raises(UnsupportedError, match=r"impossible: .* nearest|not written by") as caught:
            ckptlib.save({"w": torch.ones(2)}, url, iteration=1, **options)  # type: ignore[arg-type]
        assert str(combination) in str(caught.value)
        assert not Path(url).exists()


@pytest.mark.filterwarnings("ignore")  # torch's own, on its way of staging
def test_what_is_said_to_be_written_through_torch_is(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.save({"w": torch.ones(2)}, storage_writer=CkptWriter(tmp_path / "sync"))
        pending = dcp.async_save({"w": torch.ones(2)}, storage_writer=CkptWriter(tmp_path / "async"))
        getattr(pending, "upload_completion", pending).result()
    finally:
        dist.destroy_process_group()
    said = {each for each, writers in WRITERS.items() if any(name.endswith("CkptWriter") for name in writers)}
    assert said == {Combination("TORCH_DCP", "torch_dcp", io_mode) for io_mode in IO_MODES}
    for io_mode in IO_MODES:
        found = ckptlib.inspect(str(tmp_path / io_mode))
        assert (found.semantic_type, found.format, found.committed) == ("TORCH_DCP", "torch_dcp", True)


BY_CHECKPOINTER = [each for each, writers in WRITERS.items() if "Checkpointer.save" in writers]


@pytest.mark.parametrize("combination", BY_CHECKPOINTER, ids=str)
def test_a_checkpointer_writes_what_it_is_said_to(combination: Combination, tmp_path: Path) -> None:
    checkpointer = ckptlib.Checkpointer(
        str(tmp_path),
        run="gpt",
        semantic_type=combination.semantic_type,
        io_mode=combination.io_mode,
        background=AsyncOptions(worker="thread"),
    )
    checkpointer.save({"w": torch.ones(2)}, iteration=1)
    checkpointer.close()
    begin = json.loads((tmp_path / "iter_0000001" / "checkpoint.json").read_text())
    assert Combination(begin["semantic_type"], begin["format"], begin["io_mode"]) == combination
    target = {"w": torch.zeros(2)}
    assert ckptlib.Checkpointer(str(tmp_path), run="gpt").restore(target, at=1).iteration == 1
    assert target["w"].tolist() == [1, 1]


def test_a_checkpointer_refuses_at_once_what_it_does_not_write(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"impossible: a torch\.save file does not say where"):
        ckptlib.Checkpointer(str(tmp_path / "run"), run="gpt", semantic_type="GLOBAL", format="torch")
    assert not (tmp_path / "run").exists()


def test_the_advice_keeps_the_meaning_and_says_what_the_format_is_for() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"does not say where .* nearest possible choice is GLOBAL \+ torch_dist \+ async; "
        r"torch goes with LEGACY or LOCAL$",
    ):
        check("GLOBAL", "torch", "async")
    with pytest.raises(UnsupportedError, match=r"holds tensors and nothing else.* is GLOBAL \+ torch_dist \+ sync$"):
        check("GLOBAL", "safetensors", "sync")


def test_a_storage_in_this_process_forbids_a_worker_process_and_nothing_else() -> None:
    asynchronous = Combination("GLOBAL", "torch_dist", "async")
    assert constraint_on(asynchronous, storage=POSIX) is None
    assert constraint_on(asynchronous, storage=MEMORY, worker="thread") is None
    assert constraint_on(Combination("GLOBAL", "torch_dist", "sync"), storage=MEMORY) is None
    assert check("GLOBAL", "torch_dist", "sync", storage=MEMORY).io_mode == "sync"
    with pytest.raises(
        UnsupportedError,
        match=r"a worker process cannot write\. The nearest .* is GLOBAL \+ torch_dist \+ sync, or a worker thread",
    ):
        check("GLOBAL", "torch_dist", "async", storage=MEMORY)
    wrong_format = Combination("GLOBAL", "torch", "async")
    assert nearest(wrong_format, storage=MEMORY) == Combination("GLOBAL", "torch_dist", "sync")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("global", "torch_dist", "sync"), "semantic_type 'global': expected one of LEGACY, LOCAL, GLOBAL, TORCH_DCP"),
        (("GLOBAL", "zarr", "sync"), "format 'zarr': expected one of torch, torch_dist"),
        (("GLOBAL", "torch_dist", "background"), "io_mode 'background': expected one of sync, async"),
    ],
)
def test_an_unknown_word_is_named_with_those_that_exist(words: tuple[str, str, str], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check(*words)


def test_the_tables_in_the_documentation_are_those_of_the_code() -> None:
    """To bring them up to date, put what `ckptlib.combinations.tables()` returns behind the line that ends in -->."""
    assert DOCS.read_text().split("<!-- tables -->\n")[1] == tables()
