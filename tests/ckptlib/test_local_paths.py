"""Which path on a mounted filesystem a user means, and what is refused with a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptlib
from ckptlib import Checkpointer, storage
from ckptlib.errors import UnsupportedError
from ckptlib.storage.local_paths import local_path
from tests.support.roots import newest, small_state
from tests.support.trees import assert_same, blanked


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the user's home in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("runs/a", "{here}/runs/a"),
        ("./runs//a/", "{here}/runs/a"),
        ("../x", "{here}/../x"),
        (".", "{here}"),
        ("~/runs", "{here}/home/runs"),
        ("~", "{here}/home"),
        ("./~", "{here}/~"),
        ("/data/a b#?%20", "/data/a b#?%20"),
        ("file:///data/a", "/data/a"),
        ("file:///data/a%20b%25", "/data/a b%"),
        ("file:///data/100%", "/data/100%"),
        ("file://localhost/data/a", "/data/a"),
        ("file:/data/a", "/data/a"),
        ("file://~/runs", "{here}/home/runs"),
        ("file:///data/~", "/data/~"),
        ("s3://bucket/run", None),
        ("memory://run", None),
    ],
)
def test_a_path_is_absolute_and_a_url_is_decoded(here: Path, url: str, expected: str | None) -> None:
    assert local_path(url) == (None if expected is None else os.path.normpath(expected.format(here=here)))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_what_pathlib_writes_as_a_url_is_the_path_that_it_came_from(name: str) -> None:
    path = os.path.abspath(f"/data/{name}")
    assert local_path(Path(path).as_uri()) == path
    assert local_path(path) == path


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "the path is empty"),
        ("file:", "expected an absolute path"),
        ("file:runs/a", "expected an absolute path"),
        ("file://", "expected an absolute path"),
        ("file://tmp/run", "names the host 'tmp'.*file:///tmp/run"),
        ("~nobody-of-this-name/run", "no home directory for '~nobody-of-this-name'"),
        ("/data/a\0b", "NUL"),
        ("file:///data/%00", "NUL"),
    ],
)
def test_what_is_no_path_is_refused_and_nothing_is_made(here: Path, url: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        storage.resolve(url)
    with pytest.raises(UnsupportedError, match=words):
        ckptlib.save(small_state(1.0), url, iteration=1)
    assert os.listdir(here) == []


@pytest.mark.parametrize("form", ["runs/a b", "{here}/runs/a b", "file://{here}/runs/a%20b", "~/../runs/a b"])
def test_every_way_to_say_a_root_finds_one_run(here: Path, form: str) -> None:
    root = here / "runs" / "a b"
    (here / "home").mkdir()
    Checkpointer(form.format(here=here), run="run").save(small_state(1.0), iteration=10)
    state = blanked(small_state())
    assert Checkpointer(str(root), run="run").restore(state).iteration == 10
    assert_same(state, small_state(1.0))
    assert newest(str(root)) == (1, 10)
    assert sorted(os.listdir(here)) == ["home", "runs"]


def test_a_root_behind_a_link_is_the_same_root(here: Path) -> None:
    """It keeps the name that it was given, in what is recorded; both names lead to one run."""
    (here / "disk2").mkdir()
    (here / "runs").symlink_to("disk2", target_is_directory=True)
    through, real = str(here / "runs" / "a"), str(here / "disk2" / "a")
    first = Checkpointer(through, run="run")
    result = first.save(small_state(1.0), iteration=10)
    assert result.url.startswith(through)
    second = Checkpointer(real, run="run")
    state = blanked(small_state())
    assert second.restore(state).iteration == 10
    second.save(small_state(2.0), iteration=20)
    with pytest.raises(ckptlib.errors.FencedError):  # W8: one run, by whichever name
        first.save(small_state(3.0), iteration=30)
    assert Checkpointer(through, run="run").restore(state).iteration == 20
    assert_same(state, small_state(2.0))
    assert (here / "runs").is_symlink()


def test_a_relative_root_is_where_it_was_when_it_was_given(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process and for the one that writes: a trainer may change its directory."""
    (here / "elsewhere").mkdir()
    with Checkpointer("run", run="run", io_mode="async") as job:
        monkeypatch.chdir(here / "elsewhere")
        job.save({"w": torch.ones(10)}, iteration=1).wait(60)
    assert ckptlib.verify(str(here / "run" / "iter_0000001")).ok
    assert os.listdir(here / "elsewhere") == []
