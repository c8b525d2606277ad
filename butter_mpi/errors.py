"""The errors of butter_mpi, one tree.

::

    ButterError
      PreflightError              ranks disagree, or a rank cannot run; .report
      StartError                  the start did not come to an end; .phase .elapsed
        StartTimeoutError         ... by its deadline (also a TimeoutError)
      LibraryNotFoundError        no usable libnccl.so.2; .tried says where it was looked for
      NotSupportedError           a known call or plane that is not there; .needs
      NCCLError                   a NCCL call failed; .call .result .detail
      CUDAError                   a CUDA driver call failed; .call .code
      TransportError              the transport is not the required one, or cannot be told
      ReceiptError                a receipt is not readable or not valid
      CommunicatorClosedError     you closed it, or this process is a forked child
      CommunicatorBrokenError     it failed under you; .lost_ranks .sequence .operation .phase
        CollectiveTimeoutError    ... a rank did not come by the deadline (also a TimeoutError)
        CollectiveMismatchError   ... ranks submitted different operations; .records
        PeerLostError             ... a rank left, failed or gave up; .lost_ranks

Wrong arguments are ``TypeError`` or ``ValueError``; they are found before anything is sent and poison nothing.
Every error here pickles and keeps its facts as attributes.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ButterError",
    "CUDAError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "CommunicatorBrokenError",
    "CommunicatorClosedError",
    "LibraryNotFoundError",
    "NCCLError",
    "NotSupportedError",
    "PeerLostError",
    "PreflightError",
    "ReceiptError",
    "StartError",
    "StartTimeoutError",
    "TransportError",
]


def _rebuild(cls: type[ButterError], message: str, facts: dict[str, Any]) -> ButterError:
    return cls(message, **facts)


def text_of(error: BaseException) -> str:
    """Return an error's class and text, also where its own text cannot be made."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ButterError(Exception):
    """Base of every butter_mpi error that is not a wrong argument.

    Parameters
    ----------
    message : str
        What happened: the first line is whole in itself, detail follows below it.
    **facts
        The facts, each one of the names in ``FACTS`` of the class; they become attributes.

    Raises
    ------
    TypeError
        A fact that the class does not declare.
    """

    FACTS: ClassVar[dict[str, Any]] = {}

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        unknown = facts.keys() - self.FACTS.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no fact {', '.join(sorted(unknown))}")
        self.message = message
        self.__dict__.update({**self.FACTS, **facts})

    def __reduce__(self) -> tuple[Any, ...]:
        facts = {name: self.__dict__[name] for name in self.FACTS}
        notes = {"__notes__": list(self.__notes__)} if hasattr(self, "__notes__") else None
        return _rebuild, (type(self), self.message, facts), notes


class PreflightError(ButterError):
    """The ranks disagree or a rank cannot run; the same text on every rank.

    Attributes
    ----------
    report : PreflightReport
        Every finding of every rank.
    """

    FACTS: ClassVar[dict[str, Any]] = {"report": None}
    report: Any


class StartError(ButterError):
    """The start failed on one rank and was therefore given up on all.

    Attributes
    ----------
    phase : str
        The step of the start.
    elapsed : float
        Seconds since the start began.
    """

    FACTS: ClassVar[dict[str, Any]] = {"phase": "", "elapsed": 0.0}
    phase: str
    elapsed: float


class StartTimeoutError(StartError, TimeoutError):
    """The start did not come to an end within its deadline."""


class LibraryNotFoundError(ButterError):
    """No usable ``libnccl.so.2``.

    Attributes
    ----------
    tried : tuple of str
        Every place that was tried, each with its reason.
    """

    FACTS: ClassVar[dict[str, Any]] = {"tried": ()}
    tried: tuple[str, ...]


class NotSupportedError(ButterError):
    """A known function or plane that this library or this version does not have.

    Attributes
    ----------
    needs : str
        What would have it.
    """

    FACTS: ClassVar[dict[str, Any]] = {"needs": ""}
    needs: str


class NCCLError(ButterError):
    """A NCCL call did not succeed.

    Attributes
    ----------
    call : str
        The C function.
    result : int
        Its ``ncclResult_t``, also where this version has no name for it.
    detail : str
        NCCL's own last-error text.
    """

    FACTS: ClassVar[dict[str, Any]] = {"call": "", "result": -1, "detail": ""}
    call: str
    result: int
    detail: str


class CUDAError(ButterError):
    """A CUDA driver call did not succeed.

    Attributes
    ----------
    call : str
        The C function.
    code : int
        Its ``CUresult``.
    """

    FACTS: ClassVar[dict[str, Any]] = {"call": "", "code": -1}
    call: str
    code: int


class TransportError(ButterError):
    """The transport is not the required one, or cannot be told.

    Attributes
    ----------
    required : str
        What was asked for.
    found : tuple of str
        What was seen.
    """

    FACTS: ClassVar[dict[str, Any]] = {"required": "", "found": ()}
    required: str
    found: tuple[str, ...]


class ReceiptError(ButterError):
    """A receipt cannot be read, or is not valid by the published schema.

    Attributes
    ----------
    path : str
        The file.
    """

    FACTS: ClassVar[dict[str, Any]] = {"path": ""}
    path: str


class CommunicatorClosedError(ButterError):
    """The communicator was closed or aborted here, or belongs to the parent of this forked process."""


class CommunicatorBrokenError(ButterError):
    """The communicator failed and refuses every operation until a reconnect succeeds.

    Attributes
    ----------
    lost_ranks : tuple of int
        Ranks that left, failed or did not come.
    sequence : int or None
        The number of the operation at which it failed.
    operation : str
        That operation.
    phase : str
        Where it failed: ``"collective"``, ``"send/recv"``, ``"idle"``, ``"exit"`` ...
    """

    FACTS: ClassVar[dict[str, Any]] = {"lost_ranks": (), "sequence": None, "operation": "", "phase": ""}
    lost_ranks: tuple[int, ...]
    sequence: int | None
    operation: str
    phase: str


class CollectiveTimeoutError(CommunicatorBrokenError, TimeoutError):
    """A rank did not come to the operation by the collective deadline.

    Attributes
    ----------
    elapsed : float
        Seconds waited.
    """

    FACTS: ClassVar[dict[str, Any]] = {**CommunicatorBrokenError.FACTS, "elapsed": 0.0}
    elapsed: float


class CollectiveMismatchError(CommunicatorBrokenError):
    """Ranks submitted different operations at the same number.

    Attributes
    ----------
    records : dict of int to str
        Per rank, what it submitted and from where.
    """

    FACTS: ClassVar[dict[str, Any]] = {**CommunicatorBrokenError.FACTS, "records": {}}
    records: dict[int, str]
    # The key, and the epoch, of a communicator that broke together with this one.
    _other: tuple[str, int] = ("", 0)


class PeerLostError(CommunicatorBrokenError):
    """A rank closed its communicator, ended, failed or gave up while others still counted on it."""
