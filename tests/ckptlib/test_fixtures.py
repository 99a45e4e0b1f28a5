"""What real Megatron-Core (0.14 to 0.20) and torch wrote is inspected, verified and read, with the right values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptlib
from ckptlib import storage as st
from ckptlib.errors import CkptError, KeyMismatchError, UnsupportedError
from ckptlib.formats import torch_dist
from tests.support.foreign import COLLECTION, Fixture, collection, fingerprint, subset

FLAT = {
    "td0192_tp1pp1dp2_dpr": "dp_reshardable",
    "td0192_tp2pp1dp2_dpr": "dp_reshardable",
    "td0140_tp2pp1dp2_fsms": "fully_sharded_model_space",
}
SHIPPED = {f.name for f in subset()}
READABLE = [*subset(), *(f for f in collection() if f.format != "torch" and f.name not in SHIPPED)]
LEGACY = [f for f in collection() if f.format == "torch"]

absent = pytest.mark.skipif(
    not collection(),
    reason=f"the collection of Megatron fixtures is not at {COLLECTION} (set CKPT_FIXTURES); its subset was tested",
)
each = pytest.mark.parametrize("fixture", READABLE, ids=lambda f: f.name)


def stored_name(name: str, keys: set[str], format_: str) -> str | None:
    """Where a logical tensor of the fixtures is stored: optimizer states under either name of the master weights."""
    if name.startswith("model."):
        return name if format_ == "torch_dcp" else name.removeprefix("model.")
    part, _, key = name.removeprefix("optimizer.").partition(".")
    parts = ["param", "fp32_param"] if part == "param" else [part]
    return next((found for part in parts if (found := f"optimizer.state.{part}.{key}") in keys), None)


def those(fixtures: list[Fixture]) -> list[Any]:
    """Parameters, or one clear skip where the collection is not at hand."""
    return [pytest.param(f, id=f.name) for f in fixtures] or [pytest.param(None, id="absent", marks=absent)]


@absent
def test_the_whole_collection_is_tested() -> None:
    assert len([f for f in collection() if f.format != "torch"]) >= 23


@each
def test_inspect_says_what_a_foreign_checkpoint_is(fixture: Fixture) -> None:
    for path in fixture.iterations():
        info = ckptlib.inspect(str(path))
        assert (info.format, info.committed, info.save_id) == (fixture.format, True, None)
        assert info.iteration == int(path.name.removeprefix("iter_"))
        assert set(info.files) == {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
        assert any(FLAT.get(fixture.name, "no such form") in note for note in info.notes) == (fixture.name in FLAT)
        assert info.topology is not None
        for axis in ("tp", "pp"):
            if f"{axis}2" in fixture.name:
                assert getattr(info.topology, axis) == 2


@each
def test_verify_finds_every_file_of_a_foreign_checkpoint_in_order(fixture: Fixture) -> None:
    """V1: digests of integrity.json are `imported`; without it, the CRC-32s are checked at `first-read`."""
    path = fixture.iterations()[-1]
    for level in ("listing", "structure", "data"):
        report = ckptlib.verify(str(path), level=level)
        assert report.ok, report.problems
        assert set(report.files.values()) == {"ok"}
    origin = "imported" if (path / "integrity.json").exists() else "first-read"
    assert report.checks[".metadata"].origin == origin
    assert all(check.sha256 for check in report.checks.values())
    assert report.bytes_read >= sum(p.stat().st_size for p in path.glob("*.distcp"))


@each
def test_every_value_of_a_foreign_checkpoint_is_read_as_it_was_written(fixture: Fixture) -> None:
    for path in fixture.iterations():
        found = ckptlib.read(str(path))
        wanted = fixture.expected()
        compared = 0
        for name, entry in wanted.items():
            key = stored_name(name, set(found), fixture.format)
            if name.startswith("optimizer.") and (fixture.name in FLAT):
                continue
            assert key is not None, name
            assert fingerprint(found[key]) == tuple(entry), name
            compared += 1
        assert compared == len([n for n in wanted if n.startswith("model.") or fixture.name not in FLAT])


@each
def test_the_common_state_of_a_foreign_checkpoint_is_read(fixture: Fixture) -> None:
    storage, path = st.resolve(str(fixture.iterations()[-1]))
    common = torch_dist.read_common(storage, path)
    assert common["iteration"] == int(path[-7:])
    assert common["args"].hidden_size == 64


@each
def test_no_more_than_headers_and_payloads_are_needed(fixture: Fixture) -> None:
    """R3: a payload's place is found from its container; it never leaves it."""
    storage, path = st.resolve(str(fixture.iterations()[-1]))
    items = list(torch_dist.read_index(storage, path).chunk_items())
    for item, location in zip(items, torch_dist.locate_payloads(storage, path, items), strict=True):
        assert item.location.offset < location.payload_offset
        assert location.payload_offset + location.payload_length <= item.location.offset + item.location.length
        assert location.payload_offset % 64 == item.location.offset % 64 or location.payload_length == 0


@pytest.mark.parametrize("fixture", those([f for f in collection() if f.name in FLAT]))
def test_optimizer_state_in_flat_form_is_refused_by_name(fixture: Fixture) -> None:
    storage, path = st.resolve(str(fixture.iterations()[0]))
    index = torch_dist.read_index(storage, path)
    common = torch_dist.read_common(storage, path)
    assert torch_dist.optimizer_form(index, common) == FLAT[fixture.name]
    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    with pytest.raises(UnsupportedError, match=f"{FLAT[fixture.name]}.*conversion"):
        torch_dist.check_optimizer_request(index, common, [key], path)
    torch_dist.check_optimizer_request(index, common, ["decoder.final_layernorm.weight"], path)
    with pytest.raises(CkptError):
        ckptlib.load({"optimizer": {"state": {"exp_avg": {"no.such.key": 0}}}}, path)


@pytest.mark.parametrize("fixture", those(LEGACY))
def test_a_legacy_checkpoint_is_called_what_it_is(fixture: Fixture) -> None:
    (path,) = fixture.iterations()
    for verb in (ckptlib.inspect, ckptlib.verify):
        with pytest.raises(UnsupportedError, match="legacy"):
            verb(str(path))


def test_a_missing_tensor_of_a_foreign_checkpoint_is_named() -> None:
    (path,) = subset()[0].iterations()
    with pytest.raises(KeyMismatchError, match="no_such_tensor"):
        ckptlib.read(str(path), ["no_such_tensor"])


def test_a_foreign_checkpoint_moves_between_storages_unchanged(tmp_path: Path) -> None:
    """The same verdicts on any fsspec filesystem."""
    import fsspec

    (path,) = next(f for f in subset() if f.name == "td0140_tp1pp1_w").iterations()
    url = f"memory://fixture-{tmp_path.name}/iter_0000010"
    fsspec.filesystem("memory").put(str(path), url.removeprefix("memory://"), recursive=True)
    assert ckptlib.verify(url).files == ckptlib.verify(str(path)).files
    fsspec.filesystem("memory").rm(f"/fixture-{tmp_path.name}", recursive=True)
