"""The declarations of NCCL's C interface are those of its headers, release by release.

``nccl_abi.json`` was recorded from the headers themselves; ``reduce_nccl_abi.py`` tells how. The table of butter_mpi is
written apart from it.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.nccl_recorder import FACTS

from butter_mpi._libnccl import Library
from butter_mpi._nccl_table import HEADERS
from butter_mpi._nccl_types import (
    CONSTANTS,
    FUNCTIONS,
    NEWEST,
    OLDEST,
    RESULTS,
    STRUCTS,
    UNDEFINED,
    ctype,
    header_of,
    structure,
    version_code,
)
from butter_mpi.enums import DType, ReduceOp
from butter_mpi.errors import NotSupportedError

ROOT = Path(__file__).resolve().parents[2]
RECORDED = FACTS["headers"][0]
LAYOUTS = [
    pytest.param(struct, version, size, fields, id=f"{struct}-{version}")
    for struct, versions, size, *fields in FACTS["layouts"]
    for version in versions
]
OWN_STRUCTS = {"ncclConfigExtKey": 8, "ncclConfigExtValue": 8}
"""Nested types that have no name in C."""


class Release(Library):
    """A library of which only the version is known."""

    def __init__(self, version: int) -> None:
        self.path = "libnccl.so.2"
        self.version = version


def since(text: str) -> int:
    """The code of a first release; what the oldest header has is taken for as old as anything supported."""
    return OLDEST if text == RECORDED[0] else version_code(text)


def test_the_table_knows_every_recorded_header() -> None:
    """The releases are those that were read, in their order."""
    assert HEADERS.split() == RECORDED


def test_the_table_has_every_function_and_no_other() -> None:
    """Names and first releases are the headers'."""
    recorded = {name: since(first) for first, _, _, name, *_ in FACTS["functions"]}
    assert len(recorded) == 73
    assert {row.name: version_code(row.since) for row in FUNCTIONS.values()} == recorded


def recorded_type(text: str) -> Any:
    """Return the ctypes type that a recorded mapping names."""
    names = {struct: structure(struct, NEWEST) for struct in STRUCTS}
    return eval(text, {**vars(ctypes), **names})


@pytest.mark.parametrize("row", [pytest.param(row, id=row[3]) for row in FACTS["functions"]])
def test_prototype(row: list[Any]) -> None:
    """Result, number of arguments, their names and their types are the recorded ones."""
    _, _, returns, name, *arguments = row
    library, declared = Release(NEWEST), FUNCTIONS[name]
    result = {"ncclResult_t": ctypes.c_int, "const char *": ctypes.c_char_p, "void": None}[returns]
    assert ctype(declared.returns, NEWEST) is result
    assert [argument.name for argument in declared.arguments] == [argument for _, argument, _ in arguments]
    assert [library._type(argument) for argument in declared.arguments] == [recorded_type(t) for _, _, t in arguments]


def test_every_recorded_struct_is_declared() -> None:
    """No struct is missing, and none is invented."""
    assert set(STRUCTS) == {row[0] for row in FACTS["layouts"]} | OWN_STRUCTS.keys()


@pytest.mark.parametrize(("struct", "version", "size", "fields"), LAYOUTS)
def test_layout(struct: str, version: str, size: int, fields: list[list[Any]]) -> None:
    """Size, and each field's name, offset and size, are what the C compiler made of that release's header."""
    kind = Release(version_code(version)).structure(struct)
    assert ctypes.sizeof(kind) == size
    made = [[name, getattr(kind, name).offset, getattr(kind, name).size] for name, _ in kind._fields_]
    assert made == fields


def test_nested_types() -> None:
    """An extension's key is two integers; its value is an integer or an address."""
    assert {name: ctypes.sizeof(structure(name, NEWEST)) for name in OWN_STRUCTS} == OWN_STRUCTS
    extension = Release(NEWEST).new("ncclConfigExt_t")
    extension.key.optionId, extension.val.i = 5, -1
    assert bytes(extension)[12:20] == b"\5\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize(("version", "struct", "recorded"), FACTS["initializers"])
def test_initializer(version: str, struct: str, recorded: str) -> None:
    """A new struct has, byte by byte, what that release's own initializer gives; padding of the config is "not set"."""
    value, expected = Release(version_code(version)).new(struct), bytearray.fromhex(recorded)
    covered = {
        place
        for name, _ in value._fields_
        for field in [getattr(type(value), name)]
        for place in range(field.offset, field.offset + field.size)
    }
    if struct == "ncclConfig_t":
        unset = UNDEFINED.to_bytes(4, "little", signed=True)
        for place in set(range(len(expected))) - covered:
            expected[place] = unset[place % 4]
    assert bytes(value).hex() == expected.hex()


@pytest.mark.parametrize("version", RECORDED)
def test_constants(version: str) -> None:
    """Each enumerator and macro has that release's value, and later ones are refused with the release that has them."""
    library = Release(version_code(version))
    rows = [[name, *values] for _, name, *values in FACTS["enums"]]
    rows += [[name, [first, value]] for name, first, value in FACTS["macros"]]
    assert {row[0] for row in rows} == {row.name for row in CONSTANTS}
    for name, *values in rows:
        known = [value for first, value in values if since(first) <= library.version]
        if known:
            assert library.constant(name) == known[-1], name
        else:
            with pytest.raises(NotSupportedError, match=f"{name}: it needs NCCL {values[0][0]} or newer"):
                library.constant(name)


@pytest.mark.parametrize(
    ("version", "header"),
    [(21800, 21801), (21801, 21801), (22704, 22703), (23005, 23004), (23006, 23004), (23203, 23203), (23300, 23203)],
)
def test_a_release_that_was_not_read_is_served_by_the_header_before(version: int, header: int) -> None:
    """Layout and claimed version are of one header, so no library believes padding to be a field."""
    assert header_of(version) == header
    config = Release(version).new("ncclConfig_t")
    assert (config.version, config.size) == (header, ctypes.sizeof(structure("ncclConfig_t", header)))


CONFIG_FIELDS = {name for row in FACTS["layouts"] if row[0] == "ncclConfig_t" for name, _, _ in row[3:]}
SET_BY_NEW = {"size", "magic", "version"}


@pytest.mark.parametrize("version", RECORDED)
def test_a_config_has_the_fields_of_its_release_only(version: str) -> None:
    """A field is set where the header has it; else the error names field, both releases and the library's path."""
    library = Release(version_code(version))
    has = {name for row in FACTS["layouts"] if row[0] == "ncclConfig_t" and version in row[1] for name, _, _ in row[3:]}
    for name in sorted(CONFIG_FIELDS - SET_BY_NEW):
        value = "text" if name.endswith("Name") else 1
        if name in has:
            assert getattr(library.new("ncclConfig_t", **{name: value}), name) in (value, b"text")
        else:
            with pytest.raises(NotSupportedError) as caught:
                library.new("ncclConfig_t", **{name: value})
            start = f"libnccl.so.2 (NCCL {version}) has no ncclConfig_t.{name}: it needs NCCL "
            assert caught.value.message.startswith(start)
            assert version_code(caught.value.needs.removeprefix("NCCL ")) > library.version


def test_a_struct_that_came_later_is_refused() -> None:
    """As a field is."""
    with pytest.raises(NotSupportedError, match=r"\(NCCL 2.30.7\) has no ncclCollConfig_t: it needs NCCL 2.31.2 or"):
        Release(23007).new("ncclCollConfig_t")
    with pytest.raises(NotSupportedError, match=r"has no ncclCollConfig_t.launchCompletionEvent: it needs NCCL 2.32.3"):
        Release(23102).new("ncclCollConfig_t", launchCompletionEvent=1)


@pytest.mark.parametrize("version", [0, 21799])
def test_no_layout_is_guessed_for_an_unknown_library(version: int) -> None:
    """Without a version that is supported there is no struct."""
    with pytest.raises(NotSupportedError, match=r"structs are known from NCCL 2.18.0 on"):
        Release(version).new("ncclConfig_t")


def test_fields_that_cannot_be_set_are_told() -> None:
    """A misspelt field, one that is filled in here, a wrong type, and a number that would be cut."""
    library = Release(NEWEST)
    for name in ("Blocking", *SET_BY_NEW):
        with pytest.raises(TypeError, match=rf"ncclConfig_t has no field '{name}' to set; it has blocking, "):
            library.new("ncclConfig_t", **{name: 1})
    with pytest.raises(TypeError, match=r"ncclConfig_t.blocking: .*; got 'yes'"):
        library.new("ncclConfig_t", blocking="yes")
    with pytest.raises(TypeError, match=r"ncclConfig_t.netName must be a string; got 5"):
        library.new("ncclConfig_t", netName=5)
    with pytest.raises(ValueError, match=r"ncclConfig_t.maxCTAs: 4294967297 does not fit into int"):
        library.new("ncclConfig_t", maxCTAs=2**32 + 1)


def test_a_config_keeps_its_strings() -> None:
    """The fields are addresses of bytes that live as long as the config."""
    config = Release(NEWEST).new("ncclConfig_t", netName="IB" * 20, commName=bytes(b"train" * 20))
    address = ctypes.c_void_p.from_buffer(config, 32).value
    assert ctypes.string_at(int(address or 0)) == b"IB" * 20
    assert ctypes.string_at(ctypes.c_void_p.from_buffer(config, 48).value or 0) == b"train" * 20


def test_results_are_named_except_the_count() -> None:
    """Each result has its name; the enumerator that counts them, which moved, is none."""
    results = {name: value for enum, name, (_, value), *_ in FACTS["enums"] if enum == "ncclResult_t"}
    del results["ncclNumResults"]
    assert {name: value for value, name in RESULTS.items()} == results


def test_numbers_of_types_and_operators_are_nccls() -> None:
    """The public enumerations have the headers' numbers, for example 2 for the largest and 3 for the smallest."""
    values = {name: rows[-1][1] for _, name, *rows in FACTS["enums"]}
    names = {DType.FLOAT8_E4M3: "ncclFloat8e4m3", DType.FLOAT8_E5M2: "ncclFloat8e5m2"}
    types = [t for t in DType if t.native]
    assert {t: t.nccl for t in types} == {t: values[names.get(t, f"nccl{t.label.capitalize()}")] for t in types}
    assert len(types) == max(t.nccl for t in types) + 1 == values["ncclNumTypes"]
    assert {op.label: op.nccl for op in ReduceOp} == {
        op.label: values[f"nccl{op.label.capitalize()}"] for op in ReduceOp
    }


def test_each_known_trap_has_a_test_or_a_reason() -> None:
    """The page's table names tests that there are, or says why there is none."""
    page = (ROOT / "docs" / "explanation" / "nccl.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 15))
    files = [Path(__file__), *sorted((ROOT / "tests" / "unit").glob("test_*nccl*.py"))]
    tests = set(re.findall(r"^def (test_\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE))
    for number, _, answer in rows:
        named = set(re.findall(r"`(test_\w+)`", answer))
        assert named <= tests, number
        assert named or answer.startswith("Reason: "), number
