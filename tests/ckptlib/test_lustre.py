"""Lustre without Lustre: one function says that a path is on it, and ``lfs`` is a program that notes its calls."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import storage
from ckptlib.errors import StorageError, UnsupportedError
from ckptlib.storage import PosixOptions, PosixStorage, filesystems, lustre
from ckptlib.storage.filesystems import Room

MIB, GIB = 2**20, 2**30

LFS = """#!/bin/sh
echo "$@" >> {log}
[ -d "$(eval echo \\$$#)" ] || exit 7
case "$1 $3" in
    "getstripe "*) {getstripe} ;;
    "project "*) printf '%s\\n' "{project}" ;;
    "quota -u") printf '%s\\n' "{user}" ;;
    "quota -g") printf '%s\\n' "{group}" ;;
    "quota -p") printf '%s\\n' "{project_quota}" ;;
    *) {setstripe} ;;
esac
"""

FREE = "/lustre 10 0 0 - 3 0 0 -"
DEFAULT = "stripe_count:  1 stripe_size:   1048576 pattern:       raid0 stripe_offset: -1"


class Lfs:
    """A Lustre client's command, and what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.log = folder / "calls"
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(filesystems, "kind", lambda path: "lustre")
        self.answers()

    def answers(
        self,
        *,
        user: str = FREE,
        group: str = FREE,
        project: str = "0 - /lustre",
        project_quota: str = FREE,
        setstripe: str = "true",
        getstripe: str = f"echo '{DEFAULT}'",
    ) -> None:
        script = LFS.format(
            log=self.log,
            user=user,
            group=group,
            project=project,
            project_quota=project_quota,
            setstripe=setstripe,
            getstripe=getstripe,
        )
        (self._folder / "lfs").write_text(script)
        (self._folder / "lfs").chmod(0o755)

    def calls(self, verb: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(verb)]


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lfs:
    (tmp_path / "bin").mkdir()
    return Lfs(tmp_path / "bin", monkeypatch)


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "files", "expected"),
    [
        (0, 0, "-E -1 -c 1 -S 4M"),
        (10 * MIB, 1, "-E -1 -c 1 -S 4M"),
        (64 * GIB, 1024, "-E -1 -c 1 -S 4M"),
        (GIB, 1, "-E 256M -c 1 -S 4M -E -1 -c 4 -S 4M"),
        (105 * GIB, 8, "-E 256M -c 1 -S 4M -E 4G -c 4 -S 4M -E -1 -c 8 -S 4M"),
    ],
)
def test_a_layout_has_as_many_steps_as_the_files_reach(size: int, files: int, expected: str) -> None:
    assert " ".join(lustre.layout(size, files)) == expected


@given(st.integers(0, 2**50), st.integers(0, 20_000), st.integers(0, 2**50))
def test_larger_files_never_get_fewer_targets_and_every_layout_covers_any_file(
    size: int, files: int, more: int
) -> None:
    one, other = lustre.layout(size, files), lustre.layout(size + more, files)
    assert one == other[: len(one) - 6] + one[len(one) - 6 :]
    for arguments in (one, other):
        ends, counts = arguments[1::6], [int(count) for count in arguments[3::6]]
        assert ends[-1] == "-1"
        assert "-1" not in ends[:-1]
        assert counts == sorted(counts)
        assert counts[0] == 1
    assert int(one[-3]) <= int(other[-3])


# --- quotas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        ("     /lustre  1000  0  3000  -  10  0  30  -\n", Room(2000 * 1024, 20)),
        ("/a/very/long/path/of/a/file/system\n  1000  0  3000  -  10  0  0  -\n", Room(2000 * 1024, None)),
        ("/lustre 4000* 3000 3500 6d23h 10 0 0 -", Room(0, None)),
        ("/lustre [1000] [0] [0] - [10] [0] [5] -", Room(None, 0)),
        ("/data/7 1000 0 3000 - 10 0 30 -", Room(2000 * 1024, 20)),
        ("/data 1 2 3 1000 0 3000 - 10 0 30 -\nuid 7 is using default file quota setting", Room(2000 * 1024, 20)),
        ("/lustre 0 0 0 - 0 0 0 -", Room()),
        ("/lustre - - - - - - - -", Room()),
        ("Unexpected error", Room()),
        ("", Room()),
    ],
)
def test_what_a_quota_leaves_is_read_from_its_columns(answer: str, left: Room) -> None:
    assert lustre.parse_quota(answer) == left


@given(st.lists(st.sampled_from(["-", "0", "7", "12*", "[5]", "-1", "/p", "6d", "¹", "none", "\n"]), max_size=24))
def test_whatever_lfs_prints_is_an_answer_or_none(words: list[str]) -> None:
    text = " ".join(words)
    for number in (lustre.parse_quota(text).bytes, lustre.parse_quota(text).files, lustre.parse_project(text)):
        assert number is None or number >= 0


@pytest.mark.parametrize("whose", ["user", "group", "project"])
def test_a_quota_that_a_save_would_go_beyond_refuses_it_and_is_named(tmp_path: Path, lfs: Lfs, whose: str) -> None:
    answers = {"user": "user", "group": "group", "project": "project_quota"}
    lfs.answers(**{"project": "1234 P /lustre", answers[whose]: "/lustre 1000 0 2000 - 3 0 0 -"})
    with pytest.raises(StorageError, match=rf"iter_1.*10\.0 MiB are to be written.*quota of {whose} \d+") as caught:
        PosixStorage().prepare(str(tmp_path / "run" / "iter_1"), size=10 * MIB, files=2)
    assert caught.value.errno == errno.EDQUOT
    assert not (tmp_path / "run").exists()
    assert lfs.calls("setstripe") == []
    assert lfs.calls("quota -q -p") == [f"quota -q -p 1234 {tmp_path}"]


# --- striping ---------------------------------------------------------------------------------------------------------


def test_the_directory_of_a_checkpoint_is_striped_before_anything_is_in_it(
    tmp_path: Path, lfs: Lfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run" / "iter_0000001"
    lfs.answers(setstripe=f"ls -A {path} > {tmp_path}/seen")
    ckptlib.save({"w": torch.zeros(1000)}, str(path), iteration=1)
    assert lfs.calls("setstripe") == [f"setstripe -E -1 -c 1 -S 4M {path}"]
    assert (tmp_path / "seen").read_text() == ""
    assert ckptlib.verify(str(path)).ok


def test_a_user_chooses_stripes_or_none(tmp_path: Path, lfs: Lfs) -> None:
    for name, stripe in (("a", "-c 4 -S '16M'"), ("b", "off")):
        options = {"posix": {"stripe": stripe}}
        ckptlib.save({"w": torch.zeros(10)}, str(tmp_path / name), iteration=1, storage_options=options)
    assert lfs.calls("setstripe") == [f"setstripe -c 4 -S 16M {tmp_path}/a"]


@pytest.mark.parametrize(
    ("own", "default"),
    [
        (DEFAULT, True),
        (f"(Default) {DEFAULT}", True),
        ("", True),
        ("has no stripe info", True),
        (DEFAULT.replace("count:  1", "count:  4"), False),
        (f"{DEFAULT} pool: flash", False),
        ("lcm_layout_gen: 0 lcm_entry_count: 2 lcme_id: N/A", False),
    ],
)
def test_a_layout_that_somebody_chose_is_left_alone(tmp_path: Path, lfs: Lfs, own: str, default: bool) -> None:
    """By comparison with that of the whole filesystem; what a user chooses here comes first."""
    run = tmp_path / "a run"
    run.mkdir()
    lfs.answers(getstripe=f"""echo "$3"; case "$3" in *run) echo '{own}' ;; *) echo '{DEFAULT}' ;; esac""")
    PosixStorage().prepare(str(run / "iter_1"), size=10, files=1)
    assert bool(lfs.calls("setstripe")) == default
    assert (run / "iter_1").exists() == default
    PosixStorage(PosixOptions(stripe="-c 4")).prepare(str(run / "iter_2"), size=10, files=1)
    assert lfs.calls("setstripe")[-1] == f"setstripe -c 4 {run}/iter_2"


def test_a_pool_of_the_whole_filesystem_is_left_alone_too() -> None:
    assert not lustre.is_default(f"{DEFAULT} pool: flash", f"{DEFAULT} pool: flash")


def test_a_layout_that_cannot_be_told_is_left_alone(tmp_path: Path, lfs: Lfs) -> None:
    lfs.answers(getstripe="exit 1")
    PosixStorage().prepare(str(tmp_path / "iter_1"), size=10, files=1)
    assert lfs.calls("setstripe") == []


def test_all_that_is_asked_of_one_checkpoint_has_one_deadline(
    tmp_path: Path, lfs: Lfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lustre, "TIMEOUT", 0.5)
    lfs.answers(getstripe="exec sleep 60")
    command = lustre.Lfs()
    assert not command.has_default_layout(str(tmp_path))
    assert list(command.quotas(str(tmp_path))) == []
    assert len(lfs.calls("")) <= 1


def test_a_directory_that_is_gone_has_no_quotas(tmp_path: Path, lfs: Lfs) -> None:
    assert list(lustre.Lfs().quotas(str(tmp_path / "gone"))) == []


@pytest.mark.parametrize(("answer", "project"), [("1000 P /lustre", 1000), ("1000 - /lustre", 0), ("1000", 0), ("", 0)])
def test_a_project_counts_where_new_files_inherit_it(answer: str, project: int) -> None:
    assert lustre.parse_project(answer) == project


def test_a_failure_to_stripe_is_a_warning_and_never_a_failed_save(
    tmp_path: Path, lfs: Lfs, caplog: pytest.LogCaptureFixture
) -> None:
    lfs.answers(setstripe="echo 'unable to set stripe: Permission denied' >&2; exit 1", user="broken", project="?")
    with caplog.at_level(logging.WARNING, "ckptlib"):
        ckptlib.save({"w": torch.zeros(10)}, str(tmp_path / "a"), iteration=1)
    assert "Permission denied" in caplog.text
    assert ckptlib.verify(str(tmp_path / "a")).ok


@pytest.mark.parametrize("elsewhere", ["another filesystem", "no lfs"])
def test_elsewhere_nothing_is_asked(tmp_path: Path, lfs: Lfs, monkeypatch: pytest.MonkeyPatch, elsewhere: str) -> None:
    if elsewhere == "no lfs":
        monkeypatch.setattr(lustre.shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(filesystems, "kind", lambda path: "nfs")
    PosixStorage().prepare(str(tmp_path / "a"), size=10, files=1)
    assert not lfs.log.exists()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stripes": 4}, "'stripes': expected stripe or stale_wait or room"),
        ({"stripe": 4}, "stripe=4"),
        ({"stripe": "auto "}, "stripe='auto '"),
        ({"stripe": "-c 'x"}, "setstripe"),
        ({"stripe": ""}, "setstripe"),
        ({"stale_wait": -1}, "stale_wait=-1"),
        ({"stale_wait": "5"}, "seconds"),
        ({"stale_wait": float("nan")}, "seconds"),
        ({"room": False}, "room=False: expected 'auto' or 'off'"),
        ("off", "expected a dict"),
    ],
)
def test_options_that_there_are_not_are_named(options: object, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        storage.resolve("/somewhere", {"posix": options})


def test_an_option_of_paths_in_the_wrong_place_is_refused_and_one_of_another_root_is_not() -> None:
    """One set of options may be for a root on S3 and for a local tier."""
    with pytest.raises(UnsupportedError, match=r"'stripe': for a path it goes below 'posix'"):
        storage.resolve("/somewhere", {"stripe": "off"})
    storage.resolve("/somewhere", {"key": "k", "secret": "s", "posix": {"stripe": "off"}})
