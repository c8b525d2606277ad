"""What arrives in C, and what comes back, on a recorder that has NCCL's functions with the recorded prototypes."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
from helpers.nccl_recorder import FACTS, HANDLE, INTEGER, UNIQUE_ID, Recorder

from butter_mpi import nccl
from butter_mpi._libnccl import Library
from butter_mpi._nccl_types import UNDEFINED, UniqueId, version_code
from butter_mpi.enums import DType
from butter_mpi.errors import NCCLError, NotSupportedError

NEWEST, OLDEST = FACTS["headers"][0][-1], FACTS["headers"][0][0]
ROWS = {row[3]: row for row in FACTS["functions"]}
ENUMS = {row[0] for row in FACTS["enums"]}
ANSWERED_BY_THE_RECORDER = {"ncclGetVersion", "ncclGetErrorString", "ncclGetLastError"}
WIDE = 0xFEDC_BA98_7654_3210
COMM, RECV, COUNT = WIDE, WIDE + 3, 2**33 + 1


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The recorder as the newest known release."""
    return Recorder(tmp_path_factory.mktemp("newest"), NEWEST)


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    """The recorder as the oldest release."""
    return Recorder(tmp_path_factory.mktemp("oldest"), OLDEST)


@pytest.fixture
def recorder(newest: Recorder) -> Recorder:
    """The newest release; every call succeeds until a test says otherwise."""
    newest.answer(0)
    return newest


# Every function, with values that would show a wrong width, a wrong sign or a wrong place.


def sample(kind: Any, text: str, place: int) -> tuple[Any, str]:
    """Return a value for an argument, and how the recorder shows it."""
    numbers = {"int": -(2**31) + place, "unsigned int": 2**32 - 1 - place, "size_t": 2**63 + place}
    numbers |= dict.fromkeys(ENUMS, 2**30 - place)
    if text in numbers:
        return numbers[text], str(numbers[text])
    if kind is UniqueId:
        return UniqueId.from_buffer_copy(UNIQUE_ID), UNIQUE_ID.hex()
    if kind is ctypes.c_void_p:
        return WIDE + place, hex(WIDE + place)
    target = ctypes.create_string_buffer(b"text") if kind is ctypes.c_char_p else kind._type_()
    pointer = ctypes.cast(target, kind) if kind is ctypes.c_char_p else ctypes.pointer(target)
    return pointer, hex(ctypes.addressof(target))


@pytest.mark.parametrize("way", ["typed", "prepared"])
@pytest.mark.parametrize("name", sorted(ROWS.keys() - ANSWERED_BY_THE_RECORDER))
def test_every_argument_arrives_whole(recorder: Recorder, name: str, way: str) -> None:
    """Pointers, sizes, integers, enumerators and the 128 bytes by value are in C what they were in Python."""
    library, (_, _, returns, _, *arguments) = recorder.library, ROWS[name]
    kinds = library.function(name).argtypes
    samples = [sample(kind, row[0], place) for place, (kind, row) in enumerate(zip(kinds, arguments, strict=True))]
    values = [value for value, _ in samples]
    recorder.answer(9)
    result = library.function(name)(*values) if way == "typed" else nccl.prepared(library, name, *values)()
    assert result == (None if returns == "void" else 9)
    told, arrived = recorder.said
    assert told == name
    assert {row[1]: arrived[row[1]] for row in arguments} == {
        row[1]: shown for row, (_, shown) in zip(arguments, samples, strict=True)
    }


def test_texts_come_back_as_bytes(recorder: Recorder) -> None:
    """The two functions that return a string give it whole; NULL and a communicator are told apart."""
    library = recorder.library
    assert library.function("ncclGetErrorString")(5) == b"text of 5"
    assert library.function("ncclGetLastError")(WIDE) == b"of one"
    assert nccl.last_error(library) == "the latest warning"


def test_a_function_has_its_types_and_a_prepared_one_none(recorder: Recorder) -> None:
    """Each kind of function object is made once; preparing takes no types away from the other."""
    library = recorder.library
    typed, bare = library.function("ncclMemFree"), library.untyped("ncclMemFree")
    assert typed is library.function("ncclMemFree") and bare is library.untyped("ncclMemFree")
    assert (typed.argtypes, bare.argtypes) == ((ctypes.c_void_p,), None)


# Arguments that are refused.


@pytest.mark.parametrize(
    ("name", "args", "kind", "text"),
    [
        ("ncclMemFree", (), TypeError, r"ncclMemFree takes 1 arguments \(ptr\); got 0"),
        ("ncclMemFree", (1, 2), TypeError, r"ncclMemFree takes 1 arguments \(ptr\); got 2"),
        (
            "ncclMemFree",
            (2**64,),
            ValueError,
            r"ncclMemFree: ptr must be 0 to 18446744073709551615; got 18446744073709551616",
        ),
        ("ncclMemFree", (-1,), ValueError, r"ncclMemFree: ptr must be 0 to .*; got -1"),
        ("ncclMemFree", (1.0,), TypeError, r"ncclMemFree: ptr: .*; got 1.0"),
        ("ncclMemFree", ("1",), TypeError, r"ncclMemFree: ptr: .*; got '1'"),
        ("ncclSend", (1, -1, 0, 0, 1, 1), ValueError, r"ncclSend: count must be 0 to .*; got -1"),
        ("ncclSend", (1, None, 0, 0, 1, 1), TypeError, r"ncclSend: count: "),
        (
            "ncclSend",
            (1, 1, 0, 2**31, 1, 1),
            ValueError,
            r"ncclSend: peer must be -2147483648 to 2147483647; got 2147483648",
        ),
        ("ncclSend", (1, 1, 2**32 + 7, 0, 1, 1), ValueError, r"ncclSend: datatype must be .*; got 4294967303"),
        ("ncclCommCount", (COMM, 5), TypeError, r"ncclCommCount: count: "),
        ("ncclCommInitRank", (None, 1, UNIQUE_ID, 0), TypeError, r"ncclCommInitRank: commId: "),
    ],
)
def test_a_wrong_argument_is_told_before_the_call(
    recorder: Recorder, name: str, args: tuple[Any, ...], kind: type[Exception], text: str
) -> None:
    """Function and argument are in the message; nothing reaches C."""
    nccl.group_start(recorder.library)
    with pytest.raises(kind, match=text):
        nccl.call(recorder.library, name, *args)
    assert recorder.said == ("ncclGroupStart", {})


def test_a_prepared_call_keeps_what_it_needs(recorder: Recorder) -> None:
    """A string outlives its name; a handle is read at each call; a plain number stays as it was."""
    handle = nccl.Handle()
    bind = nccl.prepared(recorder.library, "ncclParamBind", None, b"NCCL_" + b"X" * 64)
    free = nccl.prepared(recorder.library, "ncclMemFree", handle)
    gc.collect()
    bind()
    assert recorder.said[1]["*key"] == (b"NCCL_" + b"X" * 64).hex()
    handle.value = WIDE
    free()
    assert recorder.said == ("ncclMemFree", {"ptr": hex(WIDE)})


# The checked functions.

Call = Callable[[Library], Any]

ENQUEUED: dict[str, tuple[Call, str, dict[str, str]]] = {
    "group_end": (nccl.group_end, "ncclGroupEnd", {}),
    "init_rank_config": (
        lambda lib: nccl.init_rank_config(lib, nccl.Handle(), 4, UNIQUE_ID, 3, nccl.make_config(lib)),
        "ncclCommInitRankConfig",
        {"nranks": "4", "rank": "3", "commId": UNIQUE_ID.hex(), "comm[0]": "0"},
    ),
    "split": (
        lambda lib: nccl.split(lib, COMM, -1, 5, nccl.Handle()),
        "ncclCommSplit",
        {"comm": hex(COMM), "color": "-1", "key": "5", "newcomm[0]": "0", "config": "0"},
    ),
    "shrink": (
        lambda lib: nccl.shrink(lib, COMM, [9, 8], nccl.Handle(), None, 1),
        "ncclCommShrink",
        {"comm": hex(COMM), "excludeRanksList[0]": "9", "excludeRanksCount": "2", "config": "0", "shrinkFlags": "1"},
    ),
    "finalize": (lambda lib: nccl.finalize(lib, COMM), "ncclCommFinalize", {"comm": hex(COMM)}),
    "revoke": (lambda lib: nccl.revoke(lib, COMM), "ncclCommRevoke", {"comm": hex(COMM), "revokeFlags": "0"}),
    "window_register": (
        lambda lib: nccl.window_register(lib, COMM, RECV, COUNT, nccl.Handle(), 1),
        "ncclCommWindowRegister",
        {"comm": hex(COMM), "buff": hex(RECV), "size": str(COUNT), "win[0]": "0", "winFlags": "1"},
    ),
}
"""What may be in progress, what it calls, and what must arrive there."""

FINISHED: dict[str, tuple[Call, str, dict[str, str], Any]] = {
    "get_unique_id": (nccl.get_unique_id, "ncclGetUniqueId", {}, UNIQUE_ID),
    "group_start": (nccl.group_start, "ncclGroupStart", {}, None),
    "destroy": (lambda lib: nccl.destroy(lib, COMM), "ncclCommDestroy", {"comm": hex(COMM)}, None),
    "abort": (lambda lib: nccl.abort(lib, COMM), "ncclCommAbort", {"comm": hex(COMM)}, None),
    "get_async_error": (
        lambda lib: nccl.get_async_error(lib, COMM),
        "ncclCommGetAsyncError",
        {"comm": hex(COMM), "asyncError[0]": "-1"},
        INTEGER,
    ),
    "comm_count": (lambda lib: nccl.comm_count(lib, COMM), "ncclCommCount", {"comm": hex(COMM)}, INTEGER),
    "comm_cu_device": (lambda lib: nccl.comm_cu_device(lib, COMM), "ncclCommCuDevice", {"comm": hex(COMM)}, INTEGER),
    "comm_user_rank": (lambda lib: nccl.comm_user_rank(lib, COMM), "ncclCommUserRank", {"comm": hex(COMM)}, INTEGER),
    "mem_alloc": (lambda lib: nccl.mem_alloc(lib, COUNT), "ncclMemAlloc", {"size": str(COUNT), "ptr[0]": "0"}, HANDLE),
    "mem_free": (lambda lib: nccl.mem_free(lib, RECV), "ncclMemFree", {"ptr": hex(RECV)}, None),
    "register": (
        lambda lib: nccl.register(lib, COMM, RECV, COUNT),
        "ncclCommRegister",
        {"comm": hex(COMM), "buff": hex(RECV), "size": str(COUNT), "handle[0]": "0"},
        HANDLE,
    ),
    "deregister": (lambda lib: nccl.deregister(lib, COMM, None), "ncclCommDeregister", {"handle": "0"}, None),
    "window_deregister": (
        lambda lib: nccl.window_deregister(lib, COMM, WIDE),
        "ncclCommWindowDeregister",
        {"comm": hex(COMM), "win": hex(WIDE)},
        None,
    ),
    "create_premul_sum": (
        lambda lib: nccl.create_premul_sum(lib, WIDE, 7, COMM),
        "ncclRedOpCreatePreMulSum",
        {"scalar": hex(WIDE), "datatype": "7", "residence": "0", "comm": hex(COMM)},
        INTEGER,
    ),
    "destroy_redop": (
        lambda lib: nccl.destroy_redop(lib, 5, COMM),
        "ncclRedOpDestroy",
        {"op": "5", "comm": hex(COMM)},
        None,
    ),
}
"""What is complete when it returns: what it calls, what must arrive there, and what it gives."""

NO_CALLS = {"call", "check", "prepared", "last_error", "version_text", "data_type", "make_config"}
ELSEWHERE = {"close_leaked_groups", "get_version", "require"}
CALLS: dict[str, tuple[Call, str]] = {
    **{name: (call, function) for name, (call, function, _) in ENQUEUED.items()},
    **{name: (call, function) for name, (call, function, _, _) in FINISHED.items()},
}


def test_every_checked_function_is_tried_here() -> None:
    """The tables above have all that the room offers."""
    offered = {name for name in nccl.__all__ if name.islower()}
    assert offered - NO_CALLS - ELSEWHERE == CALLS.keys()


@pytest.mark.parametrize("name", ENQUEUED)
def test_what_may_be_in_progress_says_so(recorder: Recorder, name: str) -> None:
    """Success and "in progress" are told apart and neither is raised; the arguments arrive."""
    call, function, expected = ENQUEUED[name]
    for result in (nccl.SUCCESS, nccl.IN_PROGRESS):
        recorder.answer(result)
        assert call(recorder.library) == result
        told, arrived = recorder.said
        assert told == function and expected.items() <= arrived.items(), arrived


@pytest.mark.parametrize("name", FINISHED)
def test_what_is_complete_gives_its_value(recorder: Recorder, name: str) -> None:
    """The arguments arrive, and the result is a plain Python value."""
    call, function, expected, value = FINISHED[name]
    given = call(recorder.library)
    assert given == value and type(given) is type(value)
    told, arrived = recorder.said
    assert told == function and expected.items() <= arrived.items(), arrived


@pytest.mark.parametrize("name", CALLS)
def test_a_failure_is_raised_also_one_without_a_name(recorder: Recorder, name: str) -> None:
    """Each result but success (and "in progress", where it is due) is an error with function, number and detail."""
    call, function = CALLS[name]
    for result in (1, 2, 3, 4, 5, 6, 8, 9, 99, -1, *((7,) if name in FINISHED else ())):
        recorder.answer(result)
        with pytest.raises(NCCLError) as caught:
            call(recorder.library)
        error = caught.value
        assert (error.call, error.result, error.detail) == (function, result, "the latest warning")
        named = f"({result}): text of {result}; " if result in nccl.RESULTS else f"result {result}, which NCCL 2.18 to"
        assert named in error.message


def test_a_state_is_judged_like_a_result(recorder: Recorder) -> None:
    """The state of a communicator is given as it is; a check of it raises."""
    state = nccl.get_async_error(recorder.library, COMM)
    with pytest.raises(
        NCCLError, match=r"ncclCommGetAsyncError failed with result 42, which NCCL 2.18 to 2.32 does not"
    ):
        nccl.check(recorder.library, "ncclCommGetAsyncError", state, in_progress=True)
    assert nccl.check(recorder.library, "ncclCommGetAsyncError", 7, in_progress=True) == nccl.IN_PROGRESS


# Handles and what they keep.


def test_a_new_communicator_is_known_even_when_its_start_fails(recorder: Recorder) -> None:
    """NCCL writes the handle early: it is there for abort after the error."""
    comm = nccl.Handle()
    recorder.answer(6)
    with pytest.raises(NCCLError):
        nccl.init_rank_config(recorder.library, comm, 2, UNIQUE_ID, 0, nccl.make_config(recorder.library))
    assert comm.value == HANDLE


@pytest.mark.parametrize("name", ["init_rank_config", "split", "shrink", "window_register"])
def test_a_handle_that_is_in_use_is_refused(recorder: Recorder, name: str) -> None:
    """Old releases follow what they find where the new handle goes."""
    library, used = recorder.library, nccl.Handle(5)
    calls: dict[str, Callable[[], int]] = {
        "init_rank_config": lambda: nccl.init_rank_config(library, used, 1, UNIQUE_ID, 0, nccl.make_config(library)),
        "split": lambda: nccl.split(library, COMM, 0, 0, used),
        "shrink": lambda: nccl.shrink(library, COMM, [1], used),
        "window_register": lambda: nccl.window_register(library, COMM, RECV, 8, used),
    }
    nccl.group_start(library)
    with pytest.raises(ValueError, match="the handle must be NULL before the call; it is 0x5"):
        calls[name]()
    assert recorder.said == ("ncclGroupStart", {})


def test_a_handle_keeps_what_nccl_goes_on_reading(recorder: Recorder) -> None:
    """The config, whose communicator name NCCL does not copy, lives as long as the handle."""
    library, comm = recorder.library, nccl.Handle()
    config = nccl.make_config(library, commName="train", blocking=0)
    nccl.init_rank_config(library, comm, 2, UNIQUE_ID, 0, config)
    assert comm.kept == (config,)
    assert recorder.said[1]["*config"] == bytes(config).hex()


def test_shrink_leaves_the_callers_list_alone(recorder: Recorder) -> None:
    """NCCL sorts (the recorder overwrites) the list in place: it gets a copy, which the handle keeps."""
    ranks, child = [9, 8], nccl.Handle()
    nccl.shrink(recorder.library, COMM, ranks, child)
    assert ranks == [9, 8] and list(child.kept[1]) == [INTEGER, 8]
    assert recorder.said[1]["excludeRanksList"] == hex(ctypes.addressof(child.kept[1]))


@pytest.mark.parametrize("length", [0, 127, 129])
def test_a_unique_id_of_another_length_is_refused(recorder: Recorder, length: int) -> None:
    """128 bytes, no fewer after a zero byte, no more."""
    config = nccl.make_config(recorder.library)
    with pytest.raises(ValueError, match=f"unique_id must have 128 bytes; got {length}"):
        nccl.init_rank_config(recorder.library, nccl.Handle(), 1, bytes(length), 0, config)


def test_a_scalar_is_bytes_here_or_an_address_there(recorder: Recorder) -> None:
    """The bytes of a value are read on the host, a number is a device address."""
    nccl.create_premul_sum(recorder.library, b"\0\0\0\x3f", 7, COMM)
    assert recorder.said[1]["residence"] == "1"
    nccl.create_premul_sum(recorder.library, WIDE, 7, COMM)
    assert recorder.said[1]["residence"] == "0"


# The config's rules that no field's type shows.


def test_minus_one_is_not_unset(recorder: Recorder) -> None:
    """NCCL refuses -1 in most fields and believes it in one; what is not set is left out."""
    for name in ("blocking", "splitShare", "trafficClass"):
        with pytest.raises(ValueError, match=f"ncclConfig_t.{name} must not be negative; got -1; leave it out"):
            nccl.make_config(recorder.library, **{name: -1})
    assert nccl.make_config(recorder.library, trafficClass=UNDEFINED).trafficClass == UNDEFINED
    assert nccl.make_config(recorder.library).trafficClass == UNDEFINED


def test_fewest_ctas_need_most_ctas(recorder: Recorder) -> None:
    """NCCL compares the one with the other, also where the other is not set."""
    with pytest.raises(ValueError, match=r"ncclConfig_t.minCTAs needs maxCTAs"):
        nccl.make_config(recorder.library, minCTAs=1)
    assert nccl.make_config(recorder.library, minCTAs=1, maxCTAs=2).maxCTAs == 2
    assert nccl.make_config(recorder.library, maxCTAs=2).minCTAs == UNDEFINED


# Groups that nobody sees.


def test_no_leaked_group_is_found_where_there_is_none(recorder: Recorder) -> None:
    """Closing what is not open is refused by NCCL, and that is the good answer."""
    recorder.answer(5)
    assert nccl.close_leaked_groups(recorder.library) == 0


@pytest.mark.parametrize(("result", "text"), [(0, "ncclGroupEnd closed 1000 groups"), (3, "ncclGroupEnd failed with")])
def test_groups_that_cannot_be_closed_are_an_error(recorder: Recorder, result: int, text: str) -> None:
    """A library that never comes to an end, and one that fails."""
    recorder.answer(result)
    with pytest.raises(NCCLError, match=text):
        nccl.close_leaked_groups(recorder.library)


# Older releases.


@pytest.mark.parametrize("name", ROWS)
def test_a_function_is_there_from_its_first_release_on(newest: Recorder, oldest: Recorder, name: str) -> None:
    """Where the library lacks it, the error names function, needed release, loaded release and path."""
    since, library = ROWS[name][0], oldest.library
    assert newest.library.has(name) and newest.library.function(name) is not None
    assert library.has(name) == (since == OLDEST)
    if since == OLDEST:
        return
    for ask in (library.function, library.untyped, lambda name: nccl.prepared(library, name)):
        with pytest.raises(NotSupportedError) as caught:
            ask(name)
        assert caught.value.message == f"{library.path} (NCCL {OLDEST}) has no {name}: it needs NCCL {since} or newer"
        assert caught.value.needs == f"NCCL {since}"


@pytest.mark.parametrize("name", ["shrink", "revoke", "mem_alloc", "mem_free", "register", "window_register"])
def test_a_checked_function_says_what_is_missing(oldest: Recorder, name: str) -> None:
    """The error is that of the function behind it."""
    call, function = CALLS[name]
    with pytest.raises(NotSupportedError, match=f"has no {function}: it needs NCCL 2"):
        call(oldest.library)


def test_the_layout_goes_with_the_library(oldest: Recorder, recorder: Recorder) -> None:
    """The oldest release gets 48 bytes, the newest 120, and each says so of itself."""
    sizes = {}
    oldest.answer(0)
    for made in (oldest, recorder):
        config = nccl.make_config(made.library, blocking=0)
        nccl.init_rank_config(made.library, nccl.Handle(), 1, UNIQUE_ID, 0, config)
        sizes[config.version] = len(bytes.fromhex(made.said[1]["*config"]))
    assert sizes == {version_code(OLDEST): 48, version_code(NEWEST): 120}
    arguments = (nccl.Handle().out(), 1, UniqueId(), 0, ctypes.byref(nccl.make_config(recorder.library)))
    with pytest.raises(TypeError, match=r"ncclCommInitRankConfig: config: "):
        nccl.call(oldest.library, "ncclCommInitRankConfig", *arguments)


def test_element_types_have_their_first_release(oldest: Recorder, recorder: Recorder) -> None:
    """All types have NCCL's number; the 8-bit floats are refused before NCCL 2.24."""
    types = [dtype for dtype in DType if dtype.native]
    assert [nccl.data_type(recorder.library, dtype) for dtype in types] == [dtype.nccl for dtype in types]
    for dtype in types:
        if dtype.label.startswith("float8"):
            with pytest.raises(NotSupportedError, match=r"has no ncclFloat8e(4m3|5m2): it needs NCCL 2.24.3 or newer"):
                nccl.data_type(oldest.library, dtype)
        else:
            assert nccl.data_type(oldest.library, dtype) == dtype.nccl
