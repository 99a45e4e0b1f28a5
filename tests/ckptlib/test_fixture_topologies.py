"""What Megatron-Core saved at one topology is loaded by the ranks of any other, bit for bit, reading no byte too many.

Every rank of TP in {1, 2, 4} x PP in {1, 2} (x EP in {1, 2} for experts) loads its share, one rank after the other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptlib
from ckptlib import reader
from ckptlib.errors import KeyMismatchError, ShapeMismatchError, UnsupportedError
from ckptlib.source import Source, open_source
from tests.support.foreign import COLLECTION, Fixture, collection, fingerprint, subset
from tests.support.megatron_ranks import Local, Model, flat_request, owned_range, parameters, ranks

SHIPPED = {fixture.name for fixture in subset()}
TORCH_DIST = [
    *(fixture for fixture in subset() if fixture.format == "torch_dist"),
    *(fixture for fixture in collection() if fixture.format == "torch_dist" and fixture.name not in SHIPPED),
]
IN_MODEL_SPACE = [f for f in TORCH_DIST if "_fr" in f.name or f.name.endswith(("_plain", "_moe_ep2"))]
IN_BUCKETS = [f for f in TORCH_DIST if f.name.endswith("_dpr")]
FLATTENED = [f for f in TORCH_DIST if f.name.endswith("_fsms")]

TOPOLOGIES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]
each_topology = pytest.mark.parametrize(("tp", "pp"), TOPOLOGIES, ids=[f"tp{tp}pp{pp}" for tp, pp in TOPOLOGIES])
absent = pytest.mark.skipif(not collection(), reason=f"the collection of Megatron fixtures is not at {COLLECTION}")


def those(fixtures: list[Fixture]) -> Any:
    """Parameters, or one clear skip where the collection is not at hand."""
    params = [pytest.param(f, id=f.name) for f in fixtures] or [pytest.param(None, id="absent", marks=absent)]
    return pytest.mark.parametrize("fixture", params)


@functools.cache
def expected_of(fixture: Fixture) -> dict[str, tuple[str, list[int], str]]:
    return fixture.expected()


@functools.cache
def model_of(fixture: Fixture) -> Model:
    entries = {
        name.removeprefix("model."): (tuple(shape), getattr(torch, dtype))
        for name, (dtype, shape, _) in expected_of(fixture).items()
        if name.startswith("model.")
    }
    tied = "tied" in fixture.name
    padded = "padvocab" in fixture.name
    return Model(entries, gated=not tied, tied=tied, divisible_by=8 if padded else None, vocabulary=100)


@pytest.fixture(autouse=True)
def _opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the pickle of Megatron-Core's metadata takes longer than reading such small tensors: once is enough."""
    monkeypatch.setattr(reader, "open_source", _open)


@functools.lru_cache(maxsize=1)
def _open(url: str, save_id: str | None, storage_options: None) -> Source:
    return open_source(url, save_id=save_id, storage_options=storage_options)


class Assembly:
    """Global tensors, put together from what the ranks loaded; copies must agree."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._filled: dict[str, torch.Tensor] = {}

    def add(self, key: str, box: Any, data: torch.Tensor, shape: tuple[int, ...]) -> None:
        whole = self.tensors.setdefault(key, torch.zeros(shape, dtype=data.dtype))
        filled = self._filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        where = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
        data = data.reshape(box.shape)
        known = filled[where]
        assert torch.equal(whole[where][known], data[known]), f"{key}: copies of {box} differ"
        whole[where] = data
        filled[where] = True

    def add_local(self, local: Local) -> None:
        built = local.request.build() if hasattr(local.request, "build") else [local.request]
        for piece in built:
            self.add(piece.key, piece.box, piece.data, piece.global_shape)

    def holes(self) -> list[str]:
        return [key for key, filled in self._filled.items() if not filled.all()]


def loaded(fixture: Fixture, requests: list[Any]) -> ckptlib.LoadReport:
    """Loads one rank's requests; what it does not request is another rank's."""
    (path, *_) = fixture.iterations()
    state = {str(i): request for i, request in enumerate(requests)}
    report = ckptlib.load(state, str(path), strict="return", check_coverage=False)
    assert report.missing == []
    assert report.bytes_read <= 1.01 * report.bytes_needed
    return report


@each_topology
@those(TORCH_DIST)
def test_weights_are_loaded_at_any_topology(fixture: Fixture, tp: int, pp: int) -> None:
    model = model_of(fixture)
    experts = any(".experts." in key for key in model.keys)
    for ep in (1, 2) if experts else (1,):
        assembly = Assembly()
        for rank in ranks(tp, pp, ep):
            locals_ = list(parameters(model, rank))
            report = loaded(fixture, [local.request for local in locals_])
            for local in locals_:
                assembly.add_local(local)
            if model.divisible_by is None:
                assert report.bytes_needed == sum(local.data.nbytes for local in locals_)
        assert assembly.holes() == []
        assert assembly.tensors.keys() == model.keys.keys()
        for key, whole in assembly.tensors.items():
            stored = model.keys[key][0]
            assert not whole[stored[0] :].any(), f"{key}: rows that are not stored are zero"
            if whole.shape[0] >= stored[0]:
                assert fingerprint(whole[: stored[0]]) == expected_of(fixture)["model." + key], key


@absent
@each_topology
def test_a_padded_vocabulary_is_loaded_at_any_other_padding(tp: int, pp: int) -> None:
    """Rows beyond the stored ones are zero, surplus rows are dropped."""
    fixture = next(f for f in TORCH_DIST if "padvocab" in f.name)
    wanted = load_file(fixture.path / "expected.safetensors")
    for divisible_by in (1, 8, 32):
        model = dataclasses.replace(model_of(fixture), divisible_by=divisible_by)
        rows = set()
        for rank in ranks(tp, pp):
            locals_ = list(parameters(model, rank))
            loaded(fixture, [local.request for local in locals_])
            for local in locals_:
                assert torch.equal(local.data, local.cut(wanted["model." + local.key])), local.key
            rows |= {local.global_shape[0] for local in locals_ if "word_embeddings" in local.key}
        assert rows == {model.padded(tp)}


@each_topology
@those(IN_MODEL_SPACE)
def test_optimizer_state_in_model_space_is_loaded_at_any_topology(fixture: Fixture, tp: int, pp: int) -> None:
    """As ranks of a distributed optimizer: each a range of its flattened parameters, at DP 1, 2 or 3."""
    model = model_of(fixture)
    main = "fp32_param" if fixture.name.endswith("_plain") else "param"
    ep = 2 if "_ep2" in fixture.name else 1
    dp = 1 if ep > 1 else {1: 3, 2: 2, 4: 1}[tp]
    slots = (main, "exp_avg", "exp_avg_sq")
    assembly = Assembly()
    for rank in ranks(tp, pp, ep):
        prefixes = [f"optimizer.state.{slot}." for slot in slots]
        locals_ = [
            local for prefix in prefixes for local in parameters(model, rank, prefix=prefix, dtype=torch.float32)
        ]
        for dp_rank in range(dp):
            shares = []
            for local in locals_:
                start, stop = owned_range(local.data.numel(), dp, dp_rank)
                shares += flat_request(local, start, stop, torch.full((stop - start,), 7.0))
            report = loaded(fixture, shares)
            assert report.bytes_needed == sum(piece.data.nbytes for piece in shares)
            for piece in shares:
                assembly.add(piece.key, piece.box, piece.data, piece.global_shape)
    assert assembly.holes() == []
    for slot, key in itertools.product(slots, model.keys):
        whole = assembly.tensors[f"optimizer.state.{slot}.{key}"]
        assert fingerprint(whole) == expected_of(fixture)[f"optimizer.{slot.removeprefix('fp32_')}.{key}"], key


@those(IN_BUCKETS)
def test_optimizer_state_in_buckets_says_how_to_convert_it(fixture: Fixture) -> None:
    """dp_reshardable: flat buffers of the TP and PP that wrote it."""
    model = model_of(fixture)
    rank = next(ranks(4, 1))
    weights = list(parameters(model, rank))
    states = list(parameters(model, rank, prefix="optimizer.state.exp_avg.", dtype=torch.float32))
    (path,) = fixture.iterations()
    state = {"model": [local.request for local in weights], "optimizer": [local.request for local in states]}
    with pytest.raises(KeyMismatchError, match=r"dp_reshardable.*--dist-ckpt-optim-fully-reshardable"):
        ckptlib.load(state, str(path), check_coverage=False)
    assert all((local.data == 7).all() for local in (*weights, *states)), "R4: nothing was changed"


@those(FLATTENED)
def test_optimizer_state_in_flattened_pieces_says_how_to_convert_it(fixture: Fixture) -> None:
    """fully_sharded_model_space, which Megatron-Core 0.16 and later cannot read either."""
    model = model_of(fixture)
    states = list(parameters(model, next(ranks(1, 1)), prefix="optimizer.state.exp_avg.", dtype=torch.float32))
    (path,) = fixture.iterations()
    with pytest.raises(UnsupportedError, match=r"fully_sharded_model_space.*conversion"):
        ckptlib.load(
            {"optimizer": [local.request for local in states]}, str(path), strict="return", check_coverage=False
        )


@those([f for f in TORCH_DIST if f.name == "td0192_tp1pp1_w"])
def test_another_global_shape_is_refused_before_anything_changes(fixture: Fixture) -> None:
    """R4: only a padded vocabulary may have one."""
    model = model_of(fixture)
    wider = {key: ((shape[0] * 2, *shape[1:]), dtype) for key, (shape, dtype) in model.keys.items()}
    locals_ = list(parameters(Model(wider), next(ranks(1, 1))))
    (path,) = fixture.iterations()
    with pytest.raises(ShapeMismatchError):
        ckptlib.load(
            {str(i): local.request for i, local in enumerate(locals_)}, str(path), strict="return", check_coverage=False
        )
    assert all((local.data == 7).all() for local in locals_)
