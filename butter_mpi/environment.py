"""The NCCL variables of this process as NCCL reads them, and what each must be like between ranks.

NCCL reads the C environment (``getenv``), which ``os.environ`` can differ from, and, at its first call, configuration
files whose lines it adds to that environment unless the name is there already.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from butter_mpi.findings import quoted, stand_in

__all__ = [
    "DIGEST_VARIABLE",
    "LIBRARY_VARIABLE",
    "SYSTEM_FILE",
    "Nature",
    "c_environment",
    "effective_nccl",
    "is_own",
    "kept_value",
    "known_names",
    "nature",
    "nccl_config_files",
    "set_c",
    "set_own",
]

DIGEST_VARIABLE = "BUTTER_NCCL_LIBRARY_SHA256"
LIBRARY_VARIABLE = "NCCL_LIBRARY"
SYSTEM_FILE = "/etc/nccl.conf"
_LONGEST_FILE_VALUE = 1023
_LARGEST_FILE = 1 << 20


class Nature(Enum):
    """How the value of a variable must compare between ranks."""

    ALIKE = "must be equal on every rank"
    INTERFACE = "must be equal on every rank, or, with per_host_interfaces, on every rank of a host"
    WARN = "should be equal; a difference is a warning"
    FREE = "differs by nature, or does not matter"


_NATURES = {
    **dict.fromkeys(
        ("NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"), Nature.INTERFACE
    ),
    **dict.fromkeys(("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_LEVELS", "NCCL_SET_THREAD_NAME"), Nature.WARN),
    **dict.fromkeys(("NCCL_DEBUG_TIMESTAMP_FORMAT", "NCCL_DEBUG_TIMESTAMP_LEVELS"), Nature.WARN),
    **dict.fromkeys(("NCCL_WARN_ENABLE_DEBUG_INFO", LIBRARY_VARIABLE), Nature.WARN),
    **dict.fromkeys(("NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"), Nature.FREE),
    **dict.fromkeys(("NCCL_PROFILE_DUMP_FILE", "NCCL_CONF_FILE", "NCCL_VERSION"), Nature.FREE),
}
"""Every variable that is not :attr:`Nature.ALIKE`. The files that ``NCCL_CONF_FILE`` names count by their content, and
``NCCL_VERSION`` (which container images set) says nothing about the library that is loaded."""

_SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASS", "PSK")

_KNOWN = {
    "": """ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECK_MODE CHECK_POINTERS CHUNK_SIZE COLLNET_ENABLE
        COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONF_FILE
        CONNECT_ROUND_MAX_PEERS CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_LEVELS
        DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE ENV_PLUGIN GRAPH_DUMP_FILE GRAPH_FILE
        GRAPH_HELPER_DISABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING HOSTID IBVERBS_LIB
        IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P IGNORE_NET_MISMATCH L1_SHARED_MEMORY_CARVEOUT
        LAUNCH_MODE LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LIBRARY LL128_BUFFSIZE LL128_C2C
        LL128_NTHREADS LL_BUFFSIZE LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN
        MIN_CTAS MIN_NCHANNELS MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID
        MULTI_RANK_GPU_ENABLE NCHANNELS_PER_NET_PEER NET NO_CACHE NSOCKS_PERTHREAD NTHREADS NUM_RMA_CTX NVB_DISABLE
        NVB_PRECONNECT NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME PAT_ENABLE
        PROFILE_DUMP_FILE PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PROTO PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PXN_C2C
        PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RUNTIME_CONNECT SET_STACK_SIZE
        SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY SHM_MEMCPY_MODE SHM_USE_CUDA_MEMCPY SINGLE_PROC_MEM_REG_ENABLE
        THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE TUNER_CONFIG_FILE TUNER_PLUGIN UID_STAGGER_RATE
        UID_STAGGER_THRESHOLD VERSION WARN_ENABLE_DEBUG_INFO WIN_ENABLE WORK_ARGS_BYTES WORK_FIFO_BYTES""",
    "GDR_": "FLUSH_DISABLE",
    "GDRCOPY_": "ENABLE FIFO_ENABLE FLUSH_ENABLE SYNC_ENABLE",
    "GIN_": "ENABLE TYPE PLUGIN",
    "IB_": """ADAPTIVE_ROUTING ADDR_FAMILY ADDR_RANGE AR_THRESHOLD CUDA_SUPPORT DATA_DIRECT DISABLE ECE_ENABLE FIFO_TC
        GID_INDEX HCA MERGE_NICS MERGE_VFS MQP_RETRY_ALL MQP_RETRY_CNT MQP_RETRY_SLEEP_MSEC OOO_RQ
        PCI_RELAXED_ORDERING QPS_PER_CONNECTION RETRY_CNT RETURN_ASYNC_EVENTS ROCE_VERSION_NUM
        ROUTABLE_FLID_GID_INDEX SL SPLIT_DATA_ON_QPS SUBNET_AWARE_ROUTING TC TIMEOUT USE_INLINE WARN_RAIL_LOCAL""",
    "NET_": """DISABLE_INTRA FORCE_FLUSH FORCE_MERGE GDR_C2C GDR_LEVEL GDR_READ MERGE_LEVEL
        OPTIONAL_RECV_COMPLETION OVERHEAD PLUGIN SHARED_BUFFERS SHARED_COMMS""",
    "NETDEVS_": "POLICY",
    "NVLS_": "CHUNKSIZE ENABLE NCHANNELS",
    "NVLSTREE_": "MAX_CHUNKSIZE",
    "P2P_": """DIRECT_DISABLE DISABLE LEVEL LL_THRESHOLD MAX_PEERS NET_CHUNKSIZE NVL_CHUNKSIZE PCI_CHUNKSIZE PXN_LEVEL
        READ_ENABLE USE_CUDA_MEMCPY""",
    "RMA_": "DISABLE EAGER_INIT PLUGIN",
    "SOCKET_": """FAMILY IFNAME INLINE MIN_TASKSIZE NTHREADS POLL_TIMEOUT_MSEC RCVBUF RETRY_CNT RETRY_SLEEP_MSEC
        SNDBUF""",
    "SYM_": "CE_THRESHOLD CTAS GIN_KERNELS_ENABLE KERNEL",
}
"""Names whose values may be sent and shown; any other ``NCCL_`` name could be a site's own, and hold anything."""


def known_names() -> frozenset[str]:
    """Return the names of variables whose values may be sent and shown.

    Returns
    -------
    frozenset of str
        NCCL's own variables, and the two that butter_mpi adds.
    """
    names = {f"NCCL_{prefix}{name}" for prefix, text in _KNOWN.items() for name in text.split()}
    return frozenset(names | {DIGEST_VARIABLE})


_KNOWN_NAMES = known_names()


def nature(name: str, share_gpu: bool = False) -> Nature:
    """Return how a variable must compare between ranks.

    Parameters
    ----------
    name : str
        The variable.
    share_gpu : bool, default False
        Whether ranks may share a GPU, for which each has its own ``NCCL_HOSTID``.

    Returns
    -------
    Nature
        Its nature; ``ALIKE`` for every name without an entry.
    """
    if name == "NCCL_HOSTID":
        return Nature.FREE if share_gpu else Nature.INTERFACE
    return _NATURES.get(name, Nature.ALIKE)


def kept_value(name: str, value: str) -> str:
    """Return the value itself, or a stand-in where the name is unknown or sounds secret.

    Parameters
    ----------
    name, value : str
        The variable.

    Returns
    -------
    str
        What may leave this process.
    """
    if name not in _KNOWN_NAMES or any(word in name for word in _SECRET_WORDS):
        return stand_in(value)
    return value


def c_environment() -> dict[str, str]:
    """Return the C environment of this process (``environ``), which ``getenv`` reads.

    Returns
    -------
    dict of str to str
        Names and values; of a name that is there twice, the first, as ``getenv`` does.
    """
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, str] = {}
    index = 0
    while entries and (entry := entries[index]) is not None:
        name, separator, value = os.fsdecode(entry).partition("=")
        if separator:
            found.setdefault(name, value)
        index += 1
    return found


_OWN: dict[str, str] = {}


def set_own(name: str, value: str) -> None:
    """Set a variable that butter_mpi chooses by itself, which is therefore not compared between ranks.

    Parameters
    ----------
    name, value : str
        The variable.
    """
    _OWN[name] = value
    set_c(name, value)


def is_own(name: str, value: str) -> bool:
    """Return whether a variable has the value that :func:`set_own` gave it.

    Parameters
    ----------
    name, value : str
        The variable.

    Returns
    -------
    bool
        False for one that the user has set, and for another value.
    """
    return _OWN.get(name) == value


def set_c(name: str, value: str) -> None:
    """Set a variable in the C environment and in ``os.environ``.

    Parameters
    ----------
    name, value : str
        The variable.
    """
    os.environ[name] = value


def _home_file() -> str | None:
    """NCCL asks the user database, not ``HOME``."""
    try:
        return str(Path(pwd.getpwuid(os.getuid()).pw_dir) / ".nccl.conf")
    except KeyError:
        return None


def _bounded(path: str) -> bytes:
    """Return what a file holds, without waiting or reading on for ever; refuse what could not be read so."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode) or (stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev):
        return b""
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"NCCL's configuration file {quoted(path)} is no regular file: NCCL could wait in it for ever")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        text = file.read(_LARGEST_FILE + 1)
    if len(text) > _LARGEST_FILE:
        raise ValueError(f"NCCL's configuration file {quoted(path)} has more than {_LARGEST_FILE} bytes")
    return text


def _lines(path: str) -> dict[str, str]:
    """Read one file as NCCL does: no blanks are stripped, the first of a name wins."""
    try:
        text = _bounded(path)
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in os.fsdecode(text).split("\n"):
        name, separator, value = line.removesuffix("\r").partition("=")
        if separator and name and not name.startswith("#"):
            found.setdefault(name, value[:_LONGEST_FILE_VALUE])
    return found


def nccl_config_files(env: Mapping[str, str], system_file: str = SYSTEM_FILE) -> list[tuple[str, dict[str, str]]]:
    """Return NCCL's configuration files with what they set, the stronger one first.

    Parameters
    ----------
    env : mapping of str to str
        The C environment.
    system_file : str, default "/etc/nccl.conf"
        The file that NCCL always reads.

    Returns
    -------
    list of (str, dict)
        The file that ``NCCL_CONF_FILE`` names, else the one in the home folder; then the system's. A file that cannot
        be read sets nothing, as in NCCL.

    Raises
    ------
    ValueError
        A file is a pipe, a socket or a device other than ``/dev/null``, or larger than 1 MiB: preflight takes that for
        a fault of this rank.
    """
    files = [env.get("NCCL_CONF_FILE") or _home_file(), system_file]
    return [(path, _lines(path)) for path in files if path]


def effective_nccl(env: Mapping[str, str], system_file: str = SYSTEM_FILE) -> dict[str, tuple[str, str]]:
    """Return every ``NCCL_*`` variable as NCCL will see it, and where it comes from.

    Parameters
    ----------
    env : mapping of str to str
        The C environment; it wins over files.
    system_file : str, default "/etc/nccl.conf"
        The file that NCCL always reads.

    Returns
    -------
    dict of str to (str, str)
        By name, the value and ``"environment"`` or the file's path; butter_mpi's digest variable is among them.

    Raises
    ------
    ValueError
        As :func:`nccl_config_files`.
    """
    found = {n: (v, "environment") for n, v in env.items() if n.startswith("NCCL_") or n == DIGEST_VARIABLE}
    for path, variables in nccl_config_files(env, system_file):
        for name, value in variables.items():
            if name.startswith("NCCL_"):
                found.setdefault(name, (value, path))
    return found
