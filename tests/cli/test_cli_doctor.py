"""``ckpt doctor``: findings as a table and as JSON, and exit codes that follow from them."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Ckpt


def test_the_command_shows_the_findings_and_ends_by_them(ckpt: Ckpt, tmp_path: Path) -> None:
    ended = ckpt("doctor", "storage", str(tmp_path), "--size", "1")
    assert ended.code == 0
    assert "others see at once" in ended.out
    shown = ckpt("doctor", "storage", str(tmp_path), "--size", "1", "-o", "json").json
    assert {finding["outcome"] for finding in shown["findings"]} == {"ok", "limited"}
    assert shown["storage"] == "posix"
    assert shown["left"] == []
    ended = ckpt("doctor", "storage", "nothing-such://x")
    assert ended.code != 0
    assert "nothing-such" in ended.err
