"""CUDA graphs of one operation each: captured once, launched by the host for less than a call of NCCL costs.

NCCL's communicator comes to its end only once every graph of it is destroyed, so all of them are known here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection
from typing import Any

from butter_mpi.cuda import check, load_driver, prepared
from butter_mpi.detached import Detached
from butter_mpi.device import Device
from butter_mpi.errors import CUDAError
from butter_mpi.planes.entering import Inside

__all__ = ["LAUNCH", "Graph", "Graphs", "lacking"]

LAUNCH = "cuGraphLaunch"
"""The C function that launches one."""

_NEEDED = ("cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags", "cuGraphUpload", LAUNCH)
_HOST, _EVENT_RECORD = 3, 7
_BY_HOST = "each launch of it would wait for the host, as data goes over a network"
_UNORDERED = "NCCL would not order it with other operations (NCCL_GRAPH_MIXING_SUPPORT, or nothing is moved)"


def lacking() -> str:
    """Return what the driver lacks for graphs; empty: nothing."""
    for name in _NEEDED:
        try:
            prepared(name)
        except AttributeError:
            return f"the driver has no {name}"
    return ""


def _fault(kinds: Collection[int]) -> str:
    """Return why a graph with nodes of these kinds is not used; empty: it is."""
    if _HOST in kinds:
        return _BY_HOST
    return "" if _EVENT_RECORD in kinds else _UNORDERED


def _kinds(graph: Any) -> set[int]:
    """Return the kinds of a graph's nodes."""
    driver = load_driver()
    status, _, count = driver.cuGraphGetNodes(graph)
    check("cuGraphGetNodes", status)
    if not count:
        return set()
    status, nodes, _ = driver.cuGraphGetNodes(graph, count)
    check("cuGraphGetNodes", status)
    found = [driver.cuGraphNodeGetType(node) for node in nodes]
    for status, _ in found:
        check("cuGraphNodeGetType", status)
    return {int(kind) for _, kind in found}


def _captured(device: Device, stream: int, issue: Callable[[], object]) -> Any:
    """Return the graph of what is put on a stream meanwhile; begun, made and ended in one thread."""
    # Other threads may do what they like.
    mode = load_driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    device.call("cuStreamBeginCapture", stream, mode)
    try:
        issue()
    except BaseException:
        # The stream must not stay in capture; what failed has most times spoiled it.
        with contextlib.suppress(CUDAError):
            device.call("cuGraphDestroy", device.call("cuStreamEndCapture", stream))
        raise
    return device.call("cuStreamEndCapture", stream)


class Graph:
    """An instance of a graph, made by ``Graphs.capture``.

    Parameters
    ----------
    home : Graphs
        Those of its communicator.
    device : Device
        The device.
    instance : CUgraphExec
        The driver's handle.
    comm, stream : int
        The handle of the communicator, and the stream that it is launched on.

    Attributes
    ----------
    call : tuple
        What an ``Operation`` keeps as its call.
    """

    __slots__ = ("_device", "_instance", "call", "home")

    def __init__(self, home: Graphs, device: Device, instance: Any, comm: int, stream: int) -> None:
        self.home, self._device, self._instance = home, device, instance
        arguments = [ctypes.c_void_p.from_param(value) for value in (int(instance), stream)]
        self.call = comm, prepared(LAUNCH, *arguments), LAUNCH

    def destroy(self) -> None:
        """Destroy it, once whoever asks first; one in flight goes on, and nobody waits (``cuGraphExecDestroy``)."""
        try:
            self.home.living.remove(self)
        except KeyError:
            return
        # Where the context is lost there is nothing to destroy.
        with contextlib.suppress(CUDAError):
            self._device.call("cuGraphExecDestroy", self._instance)


class Graphs:
    """All graphs of one NCCL communicator."""

    def __init__(self) -> None:
        self.living: set[Graph] = set()

    def capture(
        self, device: Device, streams: tuple[int, int], comm: int, issue: Callable[[int], object]
    ) -> Graph | str:
        """Return the graph of an operation, or why there is none that could be used.

        Parameters
        ----------
        device : Device
            The device, whose context is current.
        streams : tuple of int
            A stream of the plane's own to capture on, and that on which the graph will be launched.
        comm : int
            The communicator.
        issue : callable
            Puts the operation on a stream; what it raises passes.
        """
        own, launching = streams
        graph = made = None
        try:
            graph = _captured(device, own, lambda: issue(own))
            if fault := _fault(_kinds(graph)):
                return fault
            made = Graph(self, device, device.call("cuGraphInstantiate", graph, 0), comm, launching)
            self.living.add(made)
            device.call("cuGraphUpload", made._instance, own)
        except CUDAError as error:
            if made is not None:
                made.destroy()
            return error.message
        finally:
            if graph is not None:
                device.call("cuGraphDestroy", graph)
        return made

    def clear(self) -> None:
        """Destroy all of them."""
        for graph in list(self.living):
            graph.destroy()

    def end(self, device: Device, *inside: Inside) -> Detached:
        """Destroy all in a thread of its own, once no thread makes or launches one: an abort waits for that."""

        def run() -> None:
            for one in inside:
                one.wait_until_none()
            device.make_current()
            self.clear()

        return Detached(run)
