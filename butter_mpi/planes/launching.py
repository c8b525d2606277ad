"""Making the graphs of plans: what the ranks agree on before and behind the capture, and what becomes of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from butter_mpi.collectives import Operation, call_site, control_signature, graph_facts
from butter_mpi.control import Watch
from butter_mpi.errors import NotSupportedError
from butter_mpi.findings import by_value, ranks_text
from butter_mpi.lane import LANE
from butter_mpi.planes.graphs import Graph, lacking
from butter_mpi.planes.issuing import ADDING
from butter_mpi.planes.joining import Bound
from butter_mpi.planes.nccl_life import NcclLife

__all__ = ["UNKNOWN", "NcclGraphs"]

UNKNOWN = "ranks that are alive; which of them has not come is not known here"
"""Who is waited for inside NCCL, as messages name them."""

_LOG = logging.getLogger("butter_mpi")


class NcclGraphs(NcclLife):
    """Base of ``NcclPlane``, which has its parameters."""

    _capturing = 0
    """The stream of this plane's own on which operations are captured; 0: none was."""

    def uses_graph(self, operation: Operation) -> bool:
        """Return whether an operation with a graph is launched as one now, which is so on all ranks or on none."""
        graph = operation.graph
        if graph is None or graph.home is not self._graphs:
            return False
        return not (self._issuer.add_kernel and self._issuer.adds((operation,)))

    def _by_graph(self, operation: Operation) -> Operation:
        at_once = operation.graph.home is self._graphs and not self._issuer.add_kernel
        if not (at_once or self.uses_graph(operation)):
            # It has come to its end with its communicator; or a kernel was set. Kept, as it comes again.
            if operation.issued is None:
                operation.issued = replace(operation, graph=None)
            ordinary: Operation = operation.issued
            return ordinary
        if self._group is not None:
            raise ValueError(
                f"{self.who}: {operation.kind} #{self.sequence + 1}: a plan with graph=True inside a group, whose "
                "operations NCCL is given together; call it outside, or make the plan without a graph"
            )
        return operation

    def make_graph(self, operation: Operation) -> Graph | None:
        """Agree with every rank on a graph of an operation, captured on all; ``None``: all go on without (collective).

        Ranks say before the capture what keeps them from it, as others would wait for them inside NCCL; and behind it
        whether they use what came out.
        """
        with LANE.held(self.who, "plan_graph", self.deadline):
            self._check("plan_graph")
            self._keeping.take_back()
            if not self._all_can(operation, self._hindrance(operation)):
                return None
            made = self._capture(operation)
            all_have = False
            try:
                all_have = self._all_can(operation, made if isinstance(made, str) else "")
            finally:
                if not all_have and isinstance(made, Graph):
                    made.destroy()
            return made if all_have and isinstance(made, Graph) else None

    def _all_can(self, operation: Operation, hindrance: str) -> bool:
        """Return whether nothing keeps any rank from the graph; every rank calls it."""
        said = self._meet_for_graph(operation, hindrance)
        if any(said):
            why = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in by_value(enumerate(said)).items() if text)
            _LOG.info("%s: plan_%s: no graph is used: %s", self.who, operation.kind, why)
        return not any(said)

    def _hindrance(self, operation: Operation) -> str:
        try:
            self._check_supported(operation)
        except NotSupportedError as error:
            return error.message
        return f"it goes by {ADDING}" if self._issuer.adds((operation,)) else lacking()

    def _capture(self, operation: Operation) -> Graph | str:
        """Capture an operation on a stream of this plane's own; the call may wait for other ranks inside NCCL."""
        record = {**control_signature("plan_graph", self.sequence, call_site()), **graph_facts(operation)}
        made: list[Graph | str] = []
        if not self._capturing:
            self._capturing = self._kept.stream()

        def issue(comm: int, stream: int) -> None:
            self._issuer.issue(comm, [replace(operation, stream=stream)])

        def capture() -> None:
            with self._left_inside:
                # First: whoever takes the communicator away takes its graphs after it.
                graphs = self._graphs
                comm = self._handle("plan_graph")
                streams = self._capturing, operation.stream
                made.append(graphs.capture(self.device, streams, comm, partial(issue, comm)))

        with self._poisoning(record):
            waiting = self._waiting(record, self.deadline, unknown=UNKNOWN)
            bound = Bound(Watch(None), lambda: waiting.look(record, {}, waiting.take()))
            self._aside_until_done(capture, bound, "capturing a graph")
        return made[0]
