"""Pickles are interpreted, never trusted (R5): plain data goes out and comes back, anything else is refused by name."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import decimal
import enum
import io
import operator
import os
import pathlib
import pickle
import random
import signal
import struct
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib import archive, safe_pickle
from ckptlib.errors import CkptError, IntegrityError, RecordError, StateError, UnsafePickleError
from tests.support.foreign import fingerprint

TEXT = st.text(max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False) | st.datetimes() | st.dates() | st.times() | st.timedeltas() | st.uuids()
    | st.sampled_from([torch.bfloat16, torch.Size([2, 3]), torch.device("cuda", 1), signal.SIGTERM])
)  # fmt: skip
KEYS = TEXT | st.integers() | st.booleans() | st.tuples(TEXT, st.integers()) | st.binary(max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(TEXT, inner, max_size=2).map(lambda d: argparse.Namespace(values=d))
        | st.frozensets(st.integers() | TEXT, max_size=3)
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=10,
)


@given(VALUES)
def test_plain_data_comes_back_as_it_went_out(value: Any) -> None:
    data = safe_pickle.dump_object(value, "x")
    found = safe_pickle.load_object(data, "x")
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(torch.load(io.BytesIO(data), weights_only=False))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3).T,
        np.arange(4, dtype=">i4"),
        np.zeros((0, 3), np.float16),
        np.array(["ab", "c"]),
        np.array([True, False]),
        np.float32(3.5),
        np.dtype("float64"),
        np.random.get_state(legacy=True),
        random.getstate(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numpy_values_come_back(value: Any) -> None:
    found = safe_pickle.load_object(safe_pickle.dump_object(value, "x"), "x")
    np.testing.assert_equal(found, value)
    assert type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype
        found += found  # it owns its memory


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(10, dtype=torch.int16)[2:5],
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([1, 2], dtype=torch.uint16),
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_inside_plain_data_come_back(tensor: torch.Tensor) -> None:
    found = safe_pickle.load_object(safe_pickle.dump_object({"a": [tensor]}, "x"), "x")["a"][0]
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert fingerprint(found.detach()) == fingerprint(tensor.detach())


def test_tensors_that_share_memory_still_do() -> None:
    tensor = torch.zeros(4)
    one, two = safe_pickle.load_object(safe_pickle.dump_object([tensor, tensor[1:3]], "x"), "x")
    one.fill_(7)
    assert two.tolist() == [7, 7]


def test_containers_and_oddities_of_arguments_come_back() -> None:
    generator = torch.Generator().manual_seed(5)
    value = argparse.Namespace(
        order=collections.OrderedDict(b=1, a=2),
        default=collections.defaultdict(list, {1: [2]}),
        queue=collections.deque([1, 2], 5),
        counter=collections.Counter("abca"),
        simple=types.SimpleNamespace(z=1),
        path=pathlib.Path("/a/b"),
        buffer=io.BytesIO(b"hello"),
        array=bytearray(b"xyz"),
        nothing=b"",
        number=decimal.Decimal("1.50"),
        zone=datetime.datetime.now(datetime.timezone(datetime.timedelta(hours=2), "here")),
        kinds=[int, str, float],
        span=range(1, 9, 2),
        part=slice(1, None),
        layout=torch.strided,
        generator=generator,
        twice=[shared := [1], shared],
    )
    found = safe_pickle.load_object(safe_pickle.dump_object(value, "x"), "x")
    assert found.twice[0] is found.twice[1]
    assert found.buffer.read() == b"hello"
    assert torch.equal(found.generator.get_state(), generator.get_state())
    for special in ("buffer", "generator"):
        delattr(found, special)
        delattr(value, special)
    assert found == value
    assert found.queue.maxlen == 5
    assert found.default.default_factory is list


class Colour(enum.Enum):
    """Somebody's own class."""

    RED = 1


class Evil:
    """Runs something when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Colour.RED, "Colour"),
        (argparse.Namespace(deep=[{"colour": Colour.RED}]), "Colour"),
        (os.system, "posix.system"),
        (operator.attrgetter("x"), "operator.attrgetter"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (np.array([object()]), "object"),
        (torch.ones(1).expand(4), "4 elements"),
        (lambda: 0, "lambda"),
        (torch.ones(2).to_sparse(), "sparse"),
    ],
    ids=[
        "enum",
        "enum deep inside",
        "function",
        "callable",
        "module",
        "array of objects",
        "expanded",
        "lambda",
        "sparse",
    ],
)
def test_saving_what_could_not_be_loaded_is_refused_with_its_place(value: Any, name: str) -> None:
    with pytest.raises(StateError, match=f"args.model.*{name}"):
        safe_pickle.dump_object(value, "args.model")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Exists if hostile code ran."""
    return tmp_path / "executed"


def container_of(pickled: bytes, **records: bytes) -> bytes:
    """A `torch.save` container around any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        zipped.writestr("archive/data.pkl", pickled)
        for name, content in records.items():
            zipped.writestr(f"archive/{name.replace('__', '/')}", content)
    return out.getvalue()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """Protocol 2: module.name(*arguments)."""
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


def hostile_pickles(target: Path) -> dict[str, bytes]:
    """Attacks on an unpickler. Each would create `target`, or take the process down."""
    touch = f"touch {target}"
    proto = b"\x80\x02"
    evil = pickle.dumps(Evil(os.system, touch), protocol=2)
    legacy = io.BytesIO()
    torch.save(Evil(os.system, touch), legacy, _use_new_zipfile_serialization=False)
    setstate = b"cargparse\nNamespace\n)\x81}(" + text("__setstate__") + b"cposix\nsystem\nub" + text(touch) + b"b."
    return {
        "os.system": evil,
        "os.system in protocol 4": pickle.dumps(Evil(os.system, touch), protocol=4),
        "os.system in protocol 0": pickle.dumps(Evil(os.system, touch), protocol=0),
        "builtins.eval": pickle.dumps(Evil(eval, f"__import__('os').system('{touch}')"), protocol=2),
        "builtins.exec": pickle.dumps(Evil(exec, f"open('{target}', 'w')"), protocol=2),
        "builtins.open": pickle.dumps(Evil(open, str(target), "w"), protocol=2),
        "subprocess": proto + call("subprocess", "call", text(touch)) + b".",
        "getattr chain": proto
        + call("builtins", "getattr", call("builtins", "__import__", text("os")), text("system"))
        + b"(" + text(touch) + b"tR.",
        "importlib": proto + call("importlib", "import_module", text("os")) + b".",
        "dotted name": b"\x80\x04" + text("argparse") + text("Namespace.__init__.__globals__") + b"\x93.",
        "renamed module": proto + call("copy_reg", "_reconstructor", b"c__builtin__\nobject\n") + b".",
        "inside a list, behind good data": proto + b"](K\x01K\x02" + evil[2:-1] + b"e.",
        "as a dictionary key": proto + b"}" + evil[2:-1] + b"K\x01s.",
        "set as __setstate__": proto + setstate,
        "attribute set on a class": proto + b"cargparse\nNamespace\nN}" + text("x") + b"K\x01s\x86b.",
        "class changed": proto + b"cargparse\nNamespace\n)\x81N}" + text("__class__") + b"cos\n_wrap_close\ns\x86b.",
        "INST": proto + b"(" + text(touch) + b"iposix\nsystem\n.",
        "OBJ": proto + b"(cposix\nsystem\n" + text(touch) + b"o.",
        "NEWOBJ_EX": b"\x80\x04" + b"cposix\nsystem\n(" + text(touch) + b"t}\x92.",
        "extension code": proto + b"\x82\x07.",
        "call of a value": proto + b"K\x01)R.",
        "call of a text": proto + text("os.system") + b"(" + text(touch) + b"tR.",
        "torch's own loader": proto + call("torch.storage", "_load_from_bytes", b"C" + bytes([8]) + b"whatever") + b".",
        "torch.load": proto + call("torch.serialization", "load", text(str(target))) + b".",
        "pickle inside a pickle": proto + call("pickle", "loads", b"B" + struct.pack("<I", len(evil)) + evil) + b".",
        "numpy object array": pickle.dumps(np.array([Evil(os.system, touch)], dtype=object), protocol=2),
        "numpy structured dtype over bytes": proto
        + call("numpy", "dtype", text("V8"), b"\x89\x88")
        + b"(K\x03" + text("|") + b"N" + text("f") + b"\x85}" + text("f")
        + call("numpy", "dtype", text("O8"), b"\x89\x88")
        + b"K\x00\x86sK\x08K\x01K\x00tb.",
        "numpy load": proto + call("numpy", "load", text(str(target))) + b".",
        "default factory": proto + call("collections", "defaultdict", b"cposix\nsystem\n") + b".",
        "partial": proto + call("functools", "partial", b"cposix\nsystem\n", text(touch)) + b".",
        "path with an effect": proto
        + call("pathlib", "Path.touch", call("pathlib", "PosixPath", text(str(target)))) + b".",
        "a Megatron function": proto + call("megatron_evil.module", "run", text(touch)) + b".",
        "persistent id": proto + b"(" + text("file") + text(str(target)) + b"tQ.",
        "text persistent id": proto + b"Pwhatever\n.",
        "legacy torch.save": legacy.getvalue(),
        "huge memo index": proto + b"Nr\xff\xff\xff\xff.",
        "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**50) + b".",
        "bytearray of a terabyte": proto + call("builtins", "bytearray", b"\x8a\x06\0\0\0\0\0\1") + b".",
        "huge text": proto + b"X\xff\xff\xff\x7f.",
        "exponential hash": proto + b"}K\x00" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
        "deep hash": proto + b"}K\x00" + b"\x85" * 50_000 + b"K\x01s.",
        "billion elements": proto
        + b"cbuiltins\nlist\n" + call("builtins", "range", b"K\x00", b"\x8a\x05\0\0\0\0\1") + b"\x85R.",
    }  # fmt: skip


@pytest.mark.parametrize("attack", hostile_pickles(Path("unused")))
def test_a_hostile_pickle_is_refused_and_nothing_runs(attack: str, marker: Path) -> None:
    pickled = hostile_pickles(marker)[attack]

    def bare() -> Any:
        return safe_pickle.load_object(pickled, "some/common.pt")

    def metadata() -> Any:
        return safe_pickle.load_metadata(pickled, "some/.metadata")

    def contained() -> Any:
        return safe_pickle.load_object(container_of(pickled), "some/common.pt")

    for read in (bare, metadata, contained):
        if attack == "huge memo index" and read is not bare:
            with contextlib.suppress(RecordError):  # None is no metadata
                assert read() is None  # harmless here: the memo is a dictionary
            continue
        with pytest.raises(IntegrityError, match="some/"):
            read()
    assert not marker.exists()


def test_the_attacks_are_real(marker: Path) -> None:
    pickle.loads(hostile_pickles(marker)["os.system"])
    assert marker.exists()


@pytest.mark.parametrize(
    ("attack", "named"),
    [("os.system", "posix.system"), ("builtins.eval", "builtins.eval"), ("pickle inside a pickle", "pickle.loads")],
)
def test_the_refusal_names_the_global_and_the_file(attack: str, named: str, marker: Path) -> None:
    pickled = hostile_pickles(marker)[attack]
    for read in (safe_pickle.load_metadata, lambda data, where: safe_pickle.load_object(container_of(data), where)):
        with pytest.raises(UnsafePickleError, match=rf"some/file.*{named}.*nothing was executed"):
            read(pickled, "some/file")


def test_an_extension_that_this_process_registered_is_refused_too(marker: Path) -> None:
    import copyreg

    copyreg.add_extension("posix", "system", 7)
    try:
        with pytest.raises(UnsafePickleError):
            safe_pickle.load_metadata(b"\x80\x02\x82\x07(" + text(f"touch {marker}") + b"tR.", ".metadata")
    finally:
        copyreg.remove_extension("posix", "system", 7)
    assert not marker.exists()


def test_classes_of_megatron_become_inert_values() -> None:
    pickled = b"\x80\x02](" + call("megatron.core.transformer.enums", "AttnBackend", b"K\x05") + (
        b"cmegatron.core.optimizer.optimizer_config\nOptimizerConfig\n)\x81}" + text("lr") + b"K\x03sb"
        + b"cnvidia_resiliency_ext.x\nf\n" + b"e."
    )  # fmt: skip
    backend, config, function = safe_pickle.load_object(container_of(pickled), "common.pt")
    assert (backend.module, backend.name, backend.args, backend.value) == (
        "megatron.core.transformer.enums", "AttnBackend", (5,), 5
    )  # fmt: skip
    assert (config.name, config.state, config.lr) == ("OptimizerConfig", {"lr": 3}, 3)
    assert (function.module, function.name) == ("nvidia_resiliency_ext.x", "f")
    assert {backend: 1}[safe_pickle.Foreign("megatron.core.transformer.enums", "AttnBackend", (5,))] == 1
    with pytest.raises(AttributeError):
        _ = config.no_such_field


def test_enum_members_by_name_are_read_as_the_first_releases_of_python_3_11_write_them() -> None:
    def member(owner: bytes, name: str) -> bytes:
        return b"c__builtin__\ngetattr\n(" + owner + text(name) + b"tR"

    pickled = b"\x80\x02](" + member(b"csignal\nSignals\n", "SIGTERM")
    pickled += member(b"cmegatron.core.transformer.enums\nAttnBackend\n", "auto") + b"e."
    sigterm, backend = safe_pickle.load_object(container_of(pickled), "common.pt")
    assert sigterm is signal.SIGTERM
    assert (backend.module, backend.name, backend.member) == ("megatron.core.transformer.enums", "AttnBackend", "auto")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (b"csignal\nSignals\n", "mro"),
        (b"csignal\nSignals\n", "__init__"),
        (b"cargparse\nNamespace\n", "__init__"),
        (b"c__builtin__\nlist\n", "append"),
        (text("plain"), "format"),
        (b"c__builtin__\ngetattr\n", "__globals__"),
    ],
)
def test_getattr_gives_nothing_but_members_of_enums(owner: bytes, name: str) -> None:
    pickled = b"\x80\x02c__builtin__\ngetattr\n(" + owner + text(name) + b"tR."
    with pytest.raises(IntegrityError):
        safe_pickle.load_object(container_of(pickled), "common.pt")


@pytest.mark.parametrize(
    ("offset", "size", "stride", "elements"),
    [
        (0, (5,), (1,), 4),
        (3, (2,), (1,), 4),
        (0, (2, 2), (4, 1), 4),
        (0, (2**40,), (0,), 4),
        (0, (2**62, 2**62), (0, 0), 4),
        (5, (0,), (1,), 4),
        (2**70, (1,), (1,), 4),
    ],
)
def test_a_tensor_that_leaves_its_storage_is_damage(offset: int, size: Any, stride: Any, elements: int) -> None:
    def plain(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    kind = b"ctorch\nFloatStorage\n"
    storage = b"(" + text("storage") + kind + text("0") + text("cpu") + plain(elements) + b"tQ"
    pickled = call("torch._utils", "_rebuild_tensor_v2", storage, plain(offset), plain(size), plain(stride), b"\x89N")
    with pytest.raises(RecordError):
        safe_pickle.load_object(container_of(b"\x80\x02" + pickled + b".", data__0=bytes(16)), "x")


def test_a_negative_offset_is_damage() -> None:
    data = safe_pickle.dump_object(torch.arange(4.0)[1:], "x")
    layout = archive.parse_whole(data, "x")
    record = layout.records["data.pkl"]
    pickled = data[record.offset : record.offset + record.size]
    changed = pickled.replace(b"QK\x01", b"QJ\xff\xff\xff\xff", 1)
    assert changed != pickled
    with pytest.raises(RecordError, match="tensor"):
        safe_pickle.load_object(container_of(changed, data__0=bytes(16)), "x")


@given(st.binary(max_size=60))
def test_any_bytes_give_an_error_and_never_more(data: bytes) -> None:
    for read in (safe_pickle.load_metadata, safe_pickle.load_object):
        with pytest.raises(CkptError):
            read(data, "x")
    for read in (
        safe_pickle.load_metadata,
        lambda pickled, where: safe_pickle.load_object(container_of(pickled), where),
    ):
        with contextlib.suppress(CkptError):
            read(b"\x80\x02" + data, "x")


@given(st.data())
def test_a_damaged_pickle_gives_an_error_or_plain_data(data: st.DataObject) -> None:
    value = {"a": [1, 2.5, "x"], "n": argparse.Namespace(p=pathlib.Path("/x"), t=torch.ones(2)), "r": np.arange(3)}
    whole = safe_pickle.dump_object(value, "x")
    record = archive.parse_whole(whole, "x").records["data.pkl"]
    pickled = bytearray(whole[record.offset : record.offset + record.size])
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CkptError):
        safe_pickle.load_object(container_of(bytes(pickled), data__0=bytes(8)), "x")
