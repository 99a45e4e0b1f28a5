"""Copies of a save at other locations: the same save, committed there by itself (W1 to W9, of each location)."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptlib
from ckptlib import Checkpointer, beats, commit, exports, records, removal, roots, settling, storage, transfer
from ckptlib.errors import CopyRefusedError, IntegrityError, NotACheckpointError, UnsupportedError
from ckptlib.manifest import Manifest
from ckptlib.sending import Pace, Place
from ckptlib.storage import PosixStorage, join
from ckptlib.transfer import Transfer
from tests.ckptlib.support.recording import READING, RecordingStorage, Step
from tests.support.roots import Crash, files_of, states, tracker
from tests.support.s3_server import S3Server

MIB = 1024 * 1024


def state(fill: float = 1.0) -> dict[str, Any]:
    torch.manual_seed(7)
    return {"model": {"w": torch.randn(64, 32) * fill, "b": torch.full((5,), float(fill))}, "steps": {"done": 3}}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return all(torch.equal(left["model"][name], right["model"][name]) for name in left["model"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's root in which two attempts have saved iterations 100 and 200."""
    root = tmp_path / "run"
    for iteration in (100, 200):
        with Checkpointer(str(root), run="r") as checkpointer:
            checkpointer.save(state(iteration), iteration=iteration)
    return root


@pytest.fixture
def memory() -> Iterator[str]:
    """A directory of ``memory://`` of the test's own."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)


def save_id_of(path: Path) -> str:
    (name,) = [entry.name for entry in (path / ".ckpt").iterdir() if entry.name != "tombstones"]
    return name


def data_file(path: Path) -> Path:
    (found,) = path.glob("__*")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def restored(root: str | Path, **options: Any) -> tuple[int, dict[str, Any]]:
    into = {"model": {"w": torch.zeros(64, 32), "b": torch.zeros(5)}, "steps": {"done": 0}}
    with Checkpointer(str(root), run="r", **options) as checkpointer:
        return checkpointer.restore(into).iteration, into


# --- a copy is the same save ------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_save_at_another_place(run: Path, tmp_path: Path) -> None:
    source, there = run / "iter_0000200", tmp_path / "there"
    report = transfer.copy(str(source), str(there))
    copied = files_of(there / "iter_0000200")
    decision = f".ckpt/{report.save_id}/decision.json"
    assert report.decision.decided_by == "copy"
    assert {name: data for name, data in files_of(source).items() if name != decision} == {
        name: data for name, data in copied.items() if name != decision
    }
    for level in ("listing", "structure", "data"):
        assert ckptlib.verify(str(there / "iter_0000200"), level=level).ok
    assert tracker(there) == "200"


def test_torch_reads_a_copy(run: Path, tmp_path: Path) -> None:
    transfer.copy(str(run / "iter_0000100"), str(tmp_path / "there"))
    into = {"model.w": torch.zeros(64, 32), "model.b": torch.zeros(5)}
    dcp.load(into, checkpoint_id=str(tmp_path / "there" / "iter_0000100"))
    assert torch.equal(into["model.w"], state(100)["model"]["w"])


def test_a_run_goes_on_from_a_copy_after_all_attempts_that_led_to_it(run: Path, tmp_path: Path) -> None:
    """W8: what a training saves at the copy comes after the copy, whatever came from where."""
    there = tmp_path / "there"
    transfer.copy(str(run / "iter_0000200"), str(there))
    with Checkpointer(str(there), run="r") as checkpointer:
        assert checkpointer.attempt == 3
        into = state(0)
        assert checkpointer.restore(into).iteration == 200
        assert same(into, state(200))
        checkpointer.save(state(5), iteration=150)
    assert restored(there)[0] == 150
    scanned = roots.scan(*storage.resolve(str(there)))
    original = roots.read_identity(*storage.resolve(str(run)))
    assert scanned.identity is not None
    assert original is not None
    assert (scanned.identity.run, scanned.identity.lineage) == ("r", original.root_id)
    assert scanned.identity.root_id != original.root_id
    assert [attempt.number for attempt in scanned.attempts] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["non_persistent_global", "release"])
def test_a_copy_lies_where_its_kind_lies(tmp_path: Path, kind: Any) -> None:
    with Checkpointer(str(tmp_path / "run"), run="r") as checkpointer:
        url = checkpointer.save(state(), iteration=7, kind=kind).url
    transfer.copy(url, str(tmp_path / "there"))
    assert states(tmp_path / "there") == states(tmp_path / "run") != {}


def test_a_bare_save_is_copied_without_a_root(tmp_path: Path) -> None:
    ckptlib.save(state(), str(tmp_path / "bare"), iteration=1)
    report = transfer.copy(str(tmp_path / "bare"), str(tmp_path / "there"))
    assert report.url == str(tmp_path / "there" / "bare")
    assert [entry.name for entry in (tmp_path / "there").iterdir()] == ["bare"]
    assert ckptlib.verify(report.url).ok


def test_between_memory_and_posix_in_both_directions(run: Path, tmp_path: Path, memory: str) -> None:
    transfer.copy(str(run / "iter_0000200"), memory)
    transfer.copy(f"{memory}/iter_0000200", str(tmp_path / "back"))
    iteration, into = restored(tmp_path / "back")
    assert iteration == 200
    assert same(into, state(200))
    first, back = (
        (root / "iter_0000200" / ".ckpt" / save_id_of(run / "iter_0000200") / "manifest.json")
        for root in (run, tmp_path / "back")
    )
    assert first.read_bytes() == back.read_bytes()


def test_whole_state_dicts_are_copied_with_their_exports(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "run"), run="r", semantic_type="LEGACY") as checkpointer:
        checkpointer.save({"model": torch.nn.Linear(2, 2)}, iteration=3)
    transfer.copy(str(tmp_path / "run" / "iter_0000003"), str(tmp_path / "there"))
    assert ckptlib.verify(str(tmp_path / "there" / "iter_0000003")).ok
    assert (tmp_path / "there" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt").exists()


def test_w6_the_tracker_goes_forward_only_and_only_where_it_is_wanted(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    transfer.copy(str(run / "iter_0000100"), str(there), moves_tracker=False)
    assert roots.read_tracker(*storage.resolve(str(there))) is None
    transfer.copy(str(run / "iter_0000200"), str(there))
    transfer.copy(str(run / "iter_0000100"), str(there))
    assert tracker(there) == "200"


def test_w6_where_whoever_verifies_moves_the_tracker_a_copy_does_not(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "run"), run="r", tracker="verified") as checkpointer:
        checkpointer.save(state(), iteration=5)
    transfer.copy(str(tmp_path / "run" / "iter_0000005"), str(tmp_path / "there"))
    assert roots.read_tracker(*storage.resolve(str(tmp_path / "there"))) is None


# --- S3 ---------------------------------------------------------------------------------------------------------------


def test_parts_of_an_object_store_are_recorded_at_that_place_alone(tmp_path: Path, s3: S3Server, s3_url: str) -> None:
    """V3: the manifest knows no parts; the place does, and what it says is what the store vouches for."""
    big = {"model": {"w": torch.arange(3 * MIB, dtype=torch.float32)}}
    with Checkpointer(str(tmp_path / "run"), run="r") as checkpointer:
        url = checkpointer.save(big, iteration=1).url
    options = s3.storage_options(part_size=5 * MIB)
    report = transfer.copy(url, s3_url, target_options=options)
    store, path = storage.resolve(report.url, options)
    save = commit.read_save(store, path, report.save_id)
    manifest = commit.read_manifest(store, path, save)
    assert not any(entry.part_sha256 for entry in manifest.files)
    where = join(commit.save_dir(path, report.save_id), transfer.receipts.PARTS)
    (entry,) = [each for each in transfer.receipts.entries_at(manifest, store.get(where), where) if each.part_sha256]
    vouched = store.vouched(join(path, entry.path))
    assert vouched is not None
    assert entry.part_size == 5 * MIB
    composite = hashlib.sha256(b"".join(map(bytes.fromhex, entry.part_sha256))).hexdigest()
    assert (vouched.composite, vouched.parts) == (composite, len(entry.part_sha256))
    for level in ("store", "data"):
        assert set(ckptlib.verify(report.url, level=level, storage_options=options).files.values()) == {"ok"}
    transfer.copy(report.url, str(tmp_path / "back"), storage_options=options)
    into = {"model": {"w": torch.zeros(3 * MIB)}}
    ckptlib.load(into, str(tmp_path / "back" / "iter_0000001"))
    assert torch.equal(into["model"]["w"], big["model"]["w"])


def test_a_copy_to_an_object_store_that_was_cut_short_sends_nothing_twice(
    tmp_path: Path, s3: S3Server, s3_url: str
) -> None:
    """What the store vouches for is not read again, and not sent again."""
    with Checkpointer(str(tmp_path / "run"), run="r") as checkpointer:
        url = checkpointer.save({"w": torch.arange(3 * MIB, dtype=torch.float32)}, iteration=1).url
    options = s3.storage_options(part_size=5 * MIB)
    first = Transfer.of(url, s3_url, target_options=options)
    plan = first.plan()
    first.open(plan)
    first.send(first.manifest.files_of("data"), [])
    flip(data_file(tmp_path / "run" / "iter_0000001"))  # nobody looks at it any more
    report = Transfer.of(url, s3_url, target_options=options).apply()
    assert (report.sent, report.files) == (0, 0)
    assert ckptlib.verify(report.url, storage_options=options).ok


# --- what may not become a copy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_memory", [False, True])
def test_a_damaged_source_is_named_and_never_committed(run: Path, tmp_path: Path, memory: str, to_memory: bool) -> None:
    damaged = data_file(run / "iter_0000200")
    flip(damaged)
    target = memory if to_memory else str(tmp_path / "there")
    with pytest.raises(IntegrityError, match=rf"{damaged.name}: damaged"):
        transfer.copy(str(run / "iter_0000200"), target)
    store, root = storage.resolve(target)
    assert roots.newest_committed(store, root) is None
    assert not [entry for entry in store.list(join(root, "iter_0000200")) if not entry.is_dir]


@pytest.mark.parametrize("name", ["common.pt", "index", "metadata"])
def test_a_damaged_record_of_the_source_is_named_and_never_committed(run: Path, tmp_path: Path, name: str) -> None:
    (found,) = (run / "iter_0000200" / ".ckpt").glob(f"0*/{name}")
    flip(found)
    with pytest.raises(IntegrityError, match=rf"{name}: damaged"):
        transfer.copy(str(run / "iter_0000200"), str(tmp_path / "there"))
    assert states(tmp_path / "there") == {"iter_0000200": ["undecided"]}


def test_a_damaged_file_of_a_copy_that_was_cut_short_is_sent_again(run: Path, tmp_path: Path) -> None:
    first = Transfer.of(str(run / "iter_0000200"), str(tmp_path / "there"))
    first.open(first.plan())
    first.send(first.manifest.files_of("data"), [])
    flip(data_file(tmp_path / "there" / "iter_0000200"))
    assert first.apply().files == 1
    assert ckptlib.verify(str(tmp_path / "there" / "iter_0000200")).ok


def test_nothing_deleted_returns(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    source = str(run / "iter_0000200")
    report = transfer.copy(source, str(there))
    store, path = storage.resolve(report.url)
    exports.bury(store, path, report.save_id)  # the tombstone stays in the directory
    with pytest.raises(CopyRefusedError, match="deleted there"):
        transfer.copy(source, str(there))
    removal.remove_save(store, path, report.save_id)  # now it is the root's
    assert files_of(there / ".ckpt" / "tombstones") == {report.save_id: b""}
    with pytest.raises(CopyRefusedError, match="deleted there"):
        transfer.copy(source, str(there))
    assert not (there / "iter_0000200").exists()


def test_a_copy_that_is_deleted_while_it_is_made_is_not_committed(run: Path, tmp_path: Path) -> None:
    transferring = Transfer.of(str(run / "iter_0000200"), str(tmp_path / "there"))
    transferring.open(transferring.plan())
    transferring.send(transferring.manifest.files_of("data"), [])
    tombstone = tmp_path / "there" / ".ckpt" / "tombstones" / transferring.manifest.begin.save_id
    tombstone.parent.mkdir()
    tombstone.touch()
    with pytest.raises(CopyRefusedError, match="deleted there"):
        transferring.decide()
    assert states(tmp_path / "there") == {"iter_0000200": ["deleted"]}


def test_what_was_aborted_at_a_place_stays_aborted_there(run: Path, tmp_path: Path) -> None:
    """W8: an attempt that begins at the target decides; a copy that comes later does not change that."""
    cut_short = Transfer.of(str(run / "iter_0000200"), str(tmp_path / "there"))
    cut_short.open(cut_short.plan())
    with Checkpointer(str(tmp_path / "there"), run="r"):
        pass
    with pytest.raises(CopyRefusedError, match="aborted there"):
        cut_short.apply()
    transfer.copy(str(run / "iter_0000200"), str(tmp_path / "elsewhere"))


def test_w7_a_copy_that_lacks_only_its_decision_is_committed_by_whoever_comes(run: Path, tmp_path: Path) -> None:
    cut_short = Transfer.of(str(run / "iter_0000200"), str(tmp_path / "there"))
    cut_short.open(cut_short.plan())
    cut_short.send(cut_short.manifest.files_of("data"), [])
    cut_short._write_records()
    iteration, into = restored(tmp_path / "there")
    assert iteration == 200
    assert same(into, state(200))
    assert ckptlib.verify(str(tmp_path / "there" / "iter_0000200")).ok
    cut_short.apply()


def test_a_save_whose_decision_was_lost_is_no_copy_that_lacks_one(run: Path) -> None:
    """A copy has receipts until it is decided; who removes a decision does not make a copy of a save."""
    path = run / "iter_0000200"
    (path / ".ckpt" / save_id_of(path) / "decision.json").unlink()
    (path / "checkpoint.json").unlink()
    assert restored(run)[0] == 100


def test_a_root_of_another_run_or_of_the_same_name_is_refused(run: Path, tmp_path: Path) -> None:
    for name, message in (("other", "belongs to run 'other'"), ("r", "began by itself")):
        root = tmp_path / name
        with Checkpointer(str(root), run=name):
            pass
        with pytest.raises(CopyRefusedError, match=message):
            transfer.copy(str(run / "iter_0000200"), str(root))
        assert states(root) == {}


def test_w8_two_locations_that_were_both_trained_from_are_not_mixed(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    transfer.copy(str(run / "iter_0000200"), str(there))
    for root in (there, run):
        with Checkpointer(str(root), run="r") as checkpointer:
            checkpointer.save(state(3), iteration=300)
    with pytest.raises(CopyRefusedError, match=r"attempt 3 .* another process"):
        transfer.copy(str(run / "iter_0000300"), str(there))


def test_a_copy_that_nobody_would_read_is_refused(run: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    old = str(run / "iter_0000200")
    older = save_id_of(run / "iter_0000200")
    transfer.copy(str(run / "iter_0000100"), str(there))
    with Checkpointer(str(run), run="r") as checkpointer:
        newer = checkpointer.save(state(4), iteration=200)
    transfer.copy(newer.url, str(there))
    with pytest.raises(CopyRefusedError, match=f"holds save {newer.save_id}, which comes after {older}"):
        transfer.copy(old, str(there), save_id=older)


def test_what_is_no_save_of_ours_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "foreign"))
    with pytest.raises(UnsupportedError, match=r"another tool wrote \(torch_dcp\)"):
        transfer.copy(str(tmp_path / "foreign"), str(tmp_path / "there"))
    with pytest.raises(NotACheckpointError, match="no committed save here"):
        transfer.copy(str(tmp_path / "nothing"), str(tmp_path / "there"))
    assert not (tmp_path / "there").exists()


def test_a_checkpoint_of_another_tool_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "there" / "iter_0000200"))
    with pytest.raises(CopyRefusedError, match="another tool wrote"):
        transfer.copy(str(run / "iter_0000200"), str(tmp_path / "there"))


def test_a_plan_changes_nothing_and_says_what_is_sent(run: Path, tmp_path: Path) -> None:
    transferring = Transfer.of(str(run / "iter_0000200"), str(tmp_path / "there"))
    plan = transferring.plan()
    assert not (tmp_path / "there").exists()
    assert plan.to_json()["attempts"] == [1, 2]
    assert "5 of 5 files" in str(plan)
    assert data_file(run / "iter_0000200").name in str(plan)
    transferring.apply()
    assert transferring.plan().to_send == ()
    assert "it is there" in str(transferring.plan())


def test_a_copy_onto_itself_changes_nothing(run: Path) -> None:
    before = files_of(run)
    transfer.copy(str(run / "iter_0000200"), str(run))
    assert files_of(run) == before


# --- crashes and races ------------------------------------------------------------------------------------------------


def recorded_run() -> RecordingStorage:
    """A root at ``/run`` with one save; what it takes to make it is forgotten."""
    store = RecordingStorage()
    roots.open_root(store, "/run", "r")
    attempt = roots.start_attempt(store, "/run", "r", None)
    fake_save(store, "/run/iter_0000100", attempt)
    store.steps.clear()
    return store


def fake_save(store: storage.Storage, path: str, attempt: roots.AttemptRecord) -> None:
    """A committed save of two data files, without torch."""
    from ckptlib.index import ItemIndex
    from ckptlib.manifest import Begin, FileEntry, RankRecord

    save_id = commit.new_save_id(attempt.number)
    begin = Begin(save_id, "r", attempt.number, attempt.attempt_id, 100, 2, "plan", format="torch_dcp")
    commit.begin_save(store, path, begin)
    for rank in range(2):
        name, data = f"__{rank}_0.{save_id}.distcp", bytes([rank]) * (10 + rank)
        stream = store.open_write(join(path, name))
        stream.write(data)
        stream.finish()
        entry = FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
        items = ItemIndex.build((), (), {}).to_record()
        commit.publish_record(store, path, RankRecord(save_id, rank, 2, "plan", (entry,), items, ""))
    decision = commit.try_commit(store, path, begin, decided_by="test")
    assert decision is not None
    assert decision.outcome == "commit"
    exports.conclude(store, path, begin)


def test_w8_a_copy_that_is_being_made_is_not_aborted_by_an_attempt_that_begins_there(tmp_path: Path) -> None:
    """One process copies the files of all ranks. It is not waited for longer than for saves."""
    store, here, there = PosixStorage(), str(tmp_path / "here"), str(tmp_path / "there")
    roots.open_root(store, here, "r")
    fake_save(store, f"{here}/iter_0000100", roots.start_attempt(store, here, "r", None))
    copying = Transfer.between(Place(store, f"{here}/iter_0000100"), store, there)
    sending, goes_on = threading.Event(), threading.Event()

    def told(nbytes: int) -> None:
        sending.set()
        goes_on.wait(60)

    with ThreadPoolExecutor(1) as pool:
        copied = pool.submit(copying.apply, told=told)
        try:
            assert sending.wait(60)
            for wait in (0.0, 0.3):
                assert settling.settle(store, there, 2, wait=wait) == []
            while beats.read_beats(store, copying.target.path, copying.manifest.begin)[0].counter == 0:
                assert not copied.done()
                time.sleep(0.05)
            assert states(tmp_path / "there") == {"iter_0000100": ["undecided"]}
        finally:
            goes_on.set()
        assert copied.result(60).decision.outcome == "commit"


def test_only_receipts_of_what_is_sent_are_read() -> None:
    """One request each, and every rank of an upload would ask for those of all."""
    run = recorded_run()
    copying = Transfer.between(Place(run, "/run/iter_0000100"), run, "/there")
    copying.open(copying.plan())
    first, second = copying.manifest.files_of("data")
    copying.send((first, second), [])
    run.steps.clear()
    copying.send((second,), [])
    read = [step.path for step in run.steps if step.kind == "get" and "/sent_" in step.path]
    assert len(read) == 1


class Dying:
    """Performs steps on a disk, and dies before the n-th that changes anything; half done or not begun."""

    def __init__(self, store: RecordingStorage, step: int) -> None:
        self._store, self._left = store, step

    def __call__(self, step: Step) -> Any:
        if step.kind not in READING:
            self._left -= 1
            if self._left < 0:
                raise Crash
        result, self._store.disk = self._store.disk.apply(step)
        return result


def test_w4_a_copy_that_dies_at_any_step_is_no_commit_or_a_whole_one_and_the_next_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptlib.sending.Sender.threads", 1)
    run = recorded_run()
    whole = Transfer.between(Place(run, "/run/iter_0000100"), run, "/there")
    pristine = run.disk
    step = committed = 0
    while True:
        run.disk = pristine
        target = RecordingStorage(Dying(run, step))
        died = False
        try:
            Transfer.between(Place(run, "/run/iter_0000100"), target, "/there").apply()
        except Crash:
            died = True
        for disk in (run.disk, run.disk.after_power_loss()):
            run.disk = disk
            if commit.current_save(run, "/there/iter_0000100") is not None:
                committed += 1
                for entry in whole.manifest.files:
                    data = run.get(f"/there/iter_0000100/{entry.path}")
                    assert hashlib.sha256(data).hexdigest() == entry.sha256, (step, entry.path)
            whole.apply()
            found = roots.newest_committed(run, "/there")
            assert found is not None
            left = [entry.name for entry in run.list("/there/iter_0000100") if entry.name.endswith(".tmp")]
            assert left == [], step
            names = {entry.name for entry in run.list(commit.save_dir(found.path, found.order[2]))}
            assert names == {"begin.json", "index", "metadata", "manifest.json", "decision.json"}, step
            assert roots.read_tracker(run, "/there") == "100"
        if not died:
            break
        step += 1
    assert step > 20
    assert committed > 4


def test_copies_that_race_end_well_with_one_decision(run: Path, tmp_path: Path) -> None:
    there, errors, decisions = tmp_path / "there", [], []
    start = threading.Barrier(4)

    def race() -> None:
        start.wait()
        try:
            decisions.append(transfer.copy(str(run / "iter_0000200"), str(there)).decision)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({decision.decider for decision in decisions}) == 1
    assert ckptlib.verify(str(there / "iter_0000200")).ok
    assert "extra" not in ckptlib.verify(str(there / "iter_0000200")).files.values()


def test_a_limit_holds_senders_back() -> None:
    waited: list[float] = []
    pace = Pace(1000.0, waited.append)
    for _ in range(4):
        pace.spend(500)
    assert sum(waited) == pytest.approx(0.5 + 1.0 + 1.5, abs=0.1)


# --- records of a place -----------------------------------------------------------------------------------------------


def test_a_damaged_record_of_parts_is_a_verdict(run: Path) -> None:
    path = run / "iter_0000200"
    save_id = save_id_of(path)
    where = path / ".ckpt" / save_id / "parts.json"
    manifest = Manifest.decode((path / "checkpoint.json").read_bytes(), "")
    name = f".ckpt/{save_id}/parts.json"
    for files in ([], [manifest.files[0].to_json()]):
        where.write_bytes(records.encode("parts", {"save_id": save_id, "files": files}))
        assert ckptlib.verify(str(path)).files[name] == "ok"
    where.write_bytes(where.read_bytes()[:-1])
    assert ckptlib.verify(str(path)).files[name] in ("size", "digest")
    strange = {**manifest.files[0].to_json(), "sha256": "0" * 64}
    where.write_bytes(records.encode("parts", {"save_id": save_id, "files": [strange]}))
    report = ckptlib.verify(str(path))
    assert report.files[name] == "digest"
    assert "is not the file that the manifest names" in report.checks[name].detail
