"""NCCL calls, checked: Python values in and out, and one error class for every result that is not success.

``calls`` makes and judges a call, ``process`` has what needs no communicator, ``communicators`` their life, and
``operations`` what operations need; a function that has none of its own here goes through :func:`call`, by its C name.
Arguments have NCCL's order. A handle, a pointer and a stream are integers, or
``None`` for NULL; the wrong number, the wrong type and a number that does not fit are ``TypeError`` and ``ValueError``
before NCCL is called.

Functions that say so return ``SUCCESS`` or ``IN_PROGRESS``. The latter is no failure: the communicator is non-blocking,
and until :func:`get_async_error` gives ``SUCCESS`` only that function and :func:`abort` may be called with it. Inside a
group, ``SUCCESS`` says only that a call was queued: failures and out values come with :func:`group_end`.
"""

from __future__ import annotations

from butter_mpi._nccl_types import RESULTS, version_text
from butter_mpi.nccl.calls import IN_PROGRESS, SUCCESS, Handle, call, check, last_error, prepared
from butter_mpi.nccl.communicators import (
    abort,
    comm_count,
    comm_cu_device,
    comm_user_rank,
    destroy,
    finalize,
    get_async_error,
    init_rank_config,
    make_config,
    revoke,
    shrink,
    split,
)
from butter_mpi.nccl.operations import (
    create_premul_sum,
    data_type,
    deregister,
    destroy_redop,
    register,
    window_deregister,
    window_register,
)
from butter_mpi.nccl.process import (
    close_leaked_groups,
    get_unique_id,
    get_version,
    group_end,
    group_start,
    mem_alloc,
    mem_free,
    require,
)

__all__ = [
    "IN_PROGRESS",
    "RESULTS",
    "SUCCESS",
    "Handle",
    "abort",
    "call",
    "check",
    "close_leaked_groups",
    "comm_count",
    "comm_cu_device",
    "comm_user_rank",
    "create_premul_sum",
    "data_type",
    "deregister",
    "destroy",
    "destroy_redop",
    "finalize",
    "get_async_error",
    "get_unique_id",
    "get_version",
    "group_end",
    "group_start",
    "init_rank_config",
    "last_error",
    "make_config",
    "mem_alloc",
    "mem_free",
    "prepared",
    "register",
    "require",
    "revoke",
    "shrink",
    "split",
    "version_text",
    "window_deregister",
    "window_register",
]
