"""A pickle interpreter that can only build what a table allows (R5). Pure.

`pickle.Unpickler` with a restricted `find_class` is not enough here: whatever it hands out may be called with any
arguments and have any attribute set on it, its memo may be told to grow to 64 GiB by one opcode, and extension codes
go around `find_class` altogether. `Machine` interprets the opcodes that current picklers write (protocols 2 to 5) and
nothing else. A name becomes an object only through `Table.find`; a call happens only through `Table.calls`, whose
functions check their arguments; state is set only through `Table.builds`. Nothing is imported, and the time and
memory it takes are proportional to the length of the pickle.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptlib.errors import RecordError, UnsafePickleError

Find = Callable[[str, str], Any]
"""(module, name) -> object. Raises `KeyError` for a name that is not allowed."""

_MARK = object()
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_LEAF_KEYS = frozenset({str, int, bool, float, complex, bytes, type(None)})
_KEY_NODES = 1024
# Protocol 2 writes Python 2 names for these modules.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_RENAMED_NAMES = {
    ("builtins", name): ("builtins", new) for name, new in {"xrange": "range", "long": "int", "unicode": "str"}.items()
}


class Unfinished:
    """An object that only its state completes (a NumPy array): a build function returns what replaces it."""

    def __init__(self) -> None:
        self.memo: list[int] = []


@dataclass(frozen=True)
class Table:
    """What a pickle may use.

    Attributes:
        find: resolves a name; see `Find`.
        calls: for REDUCE and NEWOBJ: `id` of an object that `find` returned -> a function of the pickle's arguments.
        call_types: the same by exact type, called as ``function(object, *arguments)``.
        builds: for BUILD: exact type -> ``function(object, state)``, which returns the object or its replacement.
        key_types: further hashable types that may be dictionary keys; hashing one must take constant time.
        persistent: resolves a persistent id; None refuses them.
    """

    find: Find
    calls: Mapping[int, Callable[..., Any]] = field(default_factory=dict)
    call_types: Mapping[type, Callable[..., Any]] = field(default_factory=dict)
    builds: Mapping[type, Callable[[Any, Any], Any]] = field(default_factory=dict)
    key_types: frozenset[type] = frozenset()
    persistent: Callable[[Any], Any] | None = None


def interpret(data: bytes | memoryview, where: str, table: Table) -> Any:
    """The value of one pickle.

    Args:
        data: the pickle; nothing may follow its STOP.
        where: what it is, for messages.
        table: what it may use.

    Raises:
        UnsafePickleError: it names, calls or does something that the table does not allow. Nothing was executed.
        RecordError: it is damaged.
    """
    machine = Machine(bytes(data), where, table)
    try:
        return machine.run()
    except (RecordError, UnsafePickleError):
        raise
    except (
        ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError, struct.error
    ) as error:  # fmt: skip
        raise RecordError(f"{where}: damaged pickle at byte {machine.position}: {repr(error)[:300]}") from error


class Machine:
    """One run over one pickle."""

    def __init__(self, data: bytes, where: str, table: Table) -> None:
        self._data = data
        self._where = where
        self._table = table
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._unfinished = 0
        self.position = 0

    def run(self) -> Any:
        """Interprets up to STOP."""
        data, handlers = self._data, _HANDLERS
        end = len(data)
        while True:
            if self.position >= end:
                raise RecordError(f"{self._where}: damaged pickle: it ends at byte {end} without STOP")
            opcode = data[self.position]
            self.position += 1
            if opcode == 0x2E:  # STOP
                break
            handler = handlers[opcode]
            if handler is None:
                raise UnsafePickleError(
                    f"{self._where}: refused: pickle opcode 0x{opcode:02x} at byte {self.position - 1} is not one that "
                    "plain data needs; nothing was executed"
                )
            handler(self)
        if self.position != end:
            raise RecordError(f"{self._where}: damaged pickle: {end - self.position} bytes follow its end")
        if self._unfinished or len(self._stack) != 1 or self._stack[0] is _MARK:
            raise RecordError(f"{self._where}: damaged pickle: it stops with an incomplete value")
        return self._stack[0]

    def _take(self, count: int) -> bytes:
        start = self.position
        stop = start + count
        if stop > len(self._data):
            raise RecordError(f"{self._where}: damaged pickle: {count} bytes announced at byte {start}, it ends before")
        self.position = stop
        return self._data[start:stop]

    def _unsigned(self, count: int) -> int:
        return int.from_bytes(self._take(count), "little")

    def _line(self) -> str:
        stop = self._data.index(b"\n", self.position)
        line = self._data[self.position : stop]
        self.position = stop + 1
        return line.decode()

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise RecordError(f"{self._where}: damaged pickle at byte {self.position}: a mark where a value belongs")
        return value

    def _pop_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise RecordError(f"{self._where}: damaged pickle at byte {self.position}: no mark")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    # Constants and containers

    def _skip_protocol(self) -> None:
        protocol = self._unsigned(1)
        if not 2 <= protocol <= 5:
            raise UnsafePickleError(f"{self._where}: refused: pickle protocol {protocol}, expected 2 to 5")

    def _skip_frame(self) -> None:
        self._take(8)

    def _push_mark(self) -> None:
        self._stack.append(_MARK)

    def _discard(self) -> None:
        self._stack.pop()

    def _discard_mark(self) -> None:
        self._pop_mark()

    def _push_int1(self) -> None:
        self._stack.append(self._data[self.position])
        self.position += 1

    def _push_tuple(self) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def _push_frozenset(self) -> None:
        items = self._pop_mark()
        for item in items:
            self._check_key(item)
        self._stack.append(frozenset(items))

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list and type(target) is not deque:
            raise self._refused(f"appends to a {type(target).__name__}")
        target.extend(items)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items_of([key, value])

    def _set_items(self) -> None:
        self._set_items_of(self._pop_mark())

    def _set_items_of(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in _MAPPINGS:
            raise self._refused(f"sets items of a {type(target).__name__}")
        if len(items) % 2:
            raise RecordError(f"{self._where}: damaged pickle at byte {self.position}: a key without a value")
        for at in range(0, len(items), 2):
            key = items[at]
            if type(key) is not str:
                self._check_key(key)
            target[key] = items[at + 1]

    def _add_items(self) -> None:
        items = self._pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise self._refused(f"adds items to a {type(target).__name__}")
        for item in items:
            self._check_key(item)
        target.update(items)

    def _check_key(self, key: Any) -> None:
        """Hashing takes time and stack in proportion to nested tuples, which a pickle can make exponential."""
        todo, nodes = [key], 0
        while todo:
            node = todo.pop()
            nodes += 1
            kind = type(node)
            if kind is tuple:
                todo.extend(node)
            elif kind is frozenset or kind in _LEAF_KEYS or kind in self._table.key_types:
                continue  # a frozenset keeps its hash, and its items were checked when it was made
            else:
                raise self._refused(f"uses a {kind.__name__} as a key")
            if nodes > _KEY_NODES:
                raise self._refused("uses an overlong tuple as a key")

    # Memo

    def _get1(self) -> None:
        self._stack.append(self._memo[self._data[self.position]])
        self.position += 1

    def _get4(self) -> None:
        at = self.position
        self.position = at + 4
        self._stack.append(self._memo[int.from_bytes(self._data[at : at + 4], "little")])

    def _put1(self) -> None:
        self._put(self._unsigned(1))

    def _put4(self) -> None:
        self._put(self._unsigned(4))

    def _memoize(self) -> None:
        self._put(len(self._memo))

    def _put(self, at: int) -> None:
        value = self._stack[-1]
        if value is _MARK:
            raise RecordError(f"{self._where}: damaged pickle at byte {self.position}: a mark where a value belongs")
        if isinstance(value, Unfinished):
            value.memo.append(at)
        self._memo[at] = value

    # Names, calls, state

    def _global(self) -> None:
        module = self._line()
        self._push_global(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise self._refused("names a global with something that is not text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        module = _RENAMED.get(module, module)
        module, name = _RENAMED_NAMES.get((module, name), (module, name))
        try:
            self._stack.append(self._table.find(module, name))
        except KeyError:
            raise UnsafePickleError(
                f"{self._where}: refused: its pickle names {module}.{name}, which is not plain data that a checkpoint "
                "may hold; nothing was executed"
            ) from None

    def _call(self) -> None:
        arguments, target = self._pop(), self._pop()
        if type(arguments) is not tuple:
            raise self._refused("calls something with arguments that are no tuple")
        function = self._table.calls.get(id(target))
        if function is not None:
            value = function(*arguments)
        else:
            by_type = self._table.call_types.get(type(target))
            if by_type is None:
                raise self._refused(f"calls {_describe(target)}")
            value = by_type(target, *arguments)
        if isinstance(value, Unfinished):
            self._unfinished += 1
        self._stack.append(value)

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        build = self._table.builds.get(type(target))
        if build is None:
            raise self._refused(f"sets the state of {_describe(target)}")
        value = build(target, state)
        if isinstance(target, Unfinished):
            self._unfinished -= 1
            for at in target.memo:
                self._memo[at] = value
        self._stack.append(value)

    def _persistent(self) -> None:
        if self._table.persistent is None:
            raise self._refused("uses a persistent id")
        self._stack.append(self._table.persistent(self._pop()))

    def _refused(self, what: str) -> UnsafePickleError:
        return UnsafePickleError(
            f"{self._where}: refused: its pickle {what} (byte {self.position}), which plain data never does; "
            "nothing was executed"
        )


def _describe(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    return f"{target.__module__}.{name}" if isinstance(name, str) else f"a {type(target).__name__}"


Handler = Callable[[Machine], None]


def _pushes(value: Callable[[Machine], Any]) -> Handler:
    """An opcode that pushes a value read from the pickle."""

    def handler(machine: Machine) -> None:
        machine._stack.append(value(machine))

    return handler


def _sized(width: int, value: Callable[[bytes], Any]) -> Handler:
    """An opcode with a length of `width` bytes and as many bytes of content."""
    return _pushes(lambda machine: value(machine._take(machine._unsigned(width))))


def _fixed(width: int, value: Callable[[bytes], Any]) -> Handler:
    """An opcode with `width` bytes of content."""
    return _pushes(lambda machine: value(machine._take(width)))


def _tuple_of(count: int) -> Handler:
    def handler(machine: Machine) -> None:
        stack = machine._stack
        items = tuple(stack[-count:])
        # By identity: `in` would compare tensors and arrays with the mark.
        if len(items) < count or items[0] is _MARK or items[-1] is _MARK or items[count // 2] is _MARK:
            raise RecordError(f"{machine._where}: damaged pickle at byte {machine.position}: a tuple lacks items")
        stack[-count:] = [items]

    return handler


def _text(content: bytes) -> str:
    return str(content, "utf-8", "surrogatepass")


def _integer(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


_HANDLERS: list[Handler | None] = [None] * 256
for _opcode, _handler in {
    b"\x80": Machine._skip_protocol,
    b"\x95": Machine._skip_frame,
    b"(": Machine._push_mark,
    b"0": Machine._discard,
    b"1": Machine._discard_mark,
    b"N": _pushes(lambda machine: None),
    b"\x88": _pushes(lambda machine: True),
    b"\x89": _pushes(lambda machine: False),
    b"K": Machine._push_int1,
    b"M": _pushes(lambda machine: machine._unsigned(2)),
    b"J": _fixed(4, _integer),
    b"\x8a": _sized(1, _integer),  # LONG4, for integers of more than 255 bytes, is not among these opcodes
    b"G": _fixed(8, lambda content: struct.unpack(">d", content)[0]),
    b"\x8c": _sized(1, _text),
    b"X": _sized(4, _text),
    b"\x8d": _sized(8, _text),
    b"C": _sized(1, bytes),
    b"B": _sized(4, bytes),
    b"\x8e": _sized(8, bytes),
    b"\x96": _sized(8, bytearray),
    b"]": _pushes(lambda machine: []),
    b"}": _pushes(lambda machine: {}),
    b"\x8f": _pushes(lambda machine: set()),
    b")": _pushes(lambda machine: ()),
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"t": Machine._push_tuple,
    b"\x91": Machine._push_frozenset,
    b"a": Machine._append,
    b"e": Machine._appends,
    b"s": Machine._set_item,
    b"u": Machine._set_items,
    b"\x90": Machine._add_items,
    b"h": Machine._get1,
    b"j": Machine._get4,
    b"q": Machine._put1,
    b"r": Machine._put4,
    b"\x94": Machine._memoize,
    b"c": Machine._global,
    b"\x93": Machine._stack_global,
    b"R": Machine._call,
    b"\x81": Machine._call,  # NEWOBJ: the functions of a table make an object either way
    b"b": Machine._build,
    b"Q": Machine._persistent,
}.items():
    _HANDLERS[_opcode[0]] = _handler
