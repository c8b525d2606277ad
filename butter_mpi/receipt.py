"""The receipt of a selftest: what ran where, on which libraries, and what came of it; plain values only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

__all__ = ["SCHEMA_FILE", "SCHEMA_VERSION", "Difference", "Receipt", "build", "compare"]

SCHEMA_VERSION = 2
"""Changes with the meaning of any field."""

SCHEMA_FILE = "schema/receipt.schema.json"
"""Where the package has the JSON Schema, which is part of the public face."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One run of the selftest.

    Parameters
    ----------
    schema : int
        The version of this form.
    when : str
        The start of the run, UTC, ISO 8601.
    command : list of str
        The command line of rank 0.
    status : {"passed", "failed", "broken"}
        Every check passed; one failed; or the communicator broke and the run was stopped.
    world_size : int
        Ranks.
    plane : dict
        ``asked``, ``ran``, and ``why`` it ran.
    versions : dict of str to (str or None)
        Of butter_mpi, Python, MPI and the packages; ``None``: not installed.
    launcher : dict
        ``name``, and the ``size`` that its variables claim.
    hosts : list of dict
        ``host`` and its ``ranks``.
    library : dict or None
        Of rank 0's libnccl: ``path``, ``sha256``, ``version``, ``found_via`` and more; ``None`` where none was loaded.
    library_reason : str
        Why there is none; empty where there is one.
    transport : dict
        What was ``required``, and what was ``found`` in use, each kind with its ranks.
    policy : list of dict
        Each variable's ``name``, its ``value``, who ``set_by``, on which ``ranks``.
    seed : int
        Of the random data.
    checks : list of dict
        ``number``, ``id``, ``title``, ``outcome``, ``reason``, ``seconds``, ``failures`` (``rank``, ``facts``).
    timings : dict
        Seconds of ``start`` (by phase), ``checks`` and ``total``.
    preflight : dict
        The report of the comparison.
    ranks : list of dict
        Every rank's preflight record; values that may be secret are stand-ins.
    """

    schema: int
    when: str
    command: list[str]
    status: str
    world_size: int
    plane: dict[str, str]
    versions: dict[str, str | None]
    launcher: dict[str, Any]
    hosts: list[dict[str, Any]]
    library: dict[str, Any] | None
    library_reason: str
    transport: dict[str, Any]
    policy: list[dict[str, Any]]
    seed: int
    checks: list[dict[str, Any]]
    timings: dict[str, Any]
    preflight: dict[str, Any]
    ranks: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as JSON has it.

        Returns
        -------
        dict
            Plain values, in the order of the fields.
        """
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Receipt:
        """Return the receipt that :meth:`to_json` wrote.

        Parameters
        ----------
        value : mapping
            Every field by name; that the values fit is the JSON Schema's to say.

        Returns
        -------
        Receipt
            The receipt.

        Raises
        ------
        TypeError
            A field is missing or unknown.
        """
        return cls(**value)

    def text(self) -> str:
        """Return the receipt as a file has it.

        Returns
        -------
        str
            Indented JSON with a newline at its end.
        """
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"


class Difference(NamedTuple):
    """What two receipts say differently, and what each says (``None``: nothing)."""

    what: str
    first: Any
    second: Any


def build(
    *, records: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[int]] | None = None, **facts: Any
) -> Receipt:
    """Return the receipt of a run; what every rank's record tells is read from there.

    Parameters
    ----------
    records : sequence of mapping
        Every rank's preflight record, in rank order.
    found : mapping of str to sequence of int, optional
        The transports that were seen in use, each with the ranks that use it.
    **facts
        The fields that no record tells: ``when``, ``command``, ``status``, ``plane``, ``versions``, ``policy``,
        ``seed``, ``checks``, ``timings``, ``preflight``.

    Returns
    -------
    Receipt
        Of plain values, as they come back from JSON.
    """
    first = records[0]
    told = {
        "schema": SCHEMA_VERSION,
        "world_size": len(records),
        "launcher": {"name": first["launch"]["launcher"], "size": first["launch"]["claimed_size"]},
        "hosts": _hosts(records),
        "library": _library(records),
        "library_reason": _no_library(first, facts["plane"]["ran"]),
        "transport": {"required": first["settings"]["require_transport"], "found": dict(found or {})},
        "ranks": records,
    }
    plain = json.loads(json.dumps({**told, **facts}, allow_nan=False))
    return Receipt(**{field.name: plain[field.name] for field in fields(Receipt)})


def _hosts(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    hosts: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        hosts.setdefault(record["host"], []).append(rank)
    return [{"host": host, "ranks": ranks} for host, ranks in hosts.items()]


def _library(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return rank 0's library; the digest may be known from another rank of its host, which hashed for all."""
    library = records[0]["library"]
    if library is None:
        return None
    hashed = (r["library"]["sha256"] for r in records if r["library"] and r["host"] == records[0]["host"])
    return {**library, "sha256": next((digest for digest in hashed if digest), None)}


def _no_library(first: Mapping[str, Any], ran: str) -> str:
    if first["library"] is not None:
        return ""
    return str(first["library_error"] or f"the {ran} plane loads no libnccl")


def compare(a: Receipt, b: Receipt) -> list[Difference]:
    """Return what differs between two runs, apart from what differs by nature.

    By nature differ: the time, the durations, host names, process ids, the command line, the random seed.

    Parameters
    ----------
    a, b : Receipt
        The two.

    Returns
    -------
    list of Difference
        In the order of a receipt's fields; empty when the runs were alike.
    """
    one, other = _facts(a), _facts(b)
    names = [*one, *(name for name in other if name not in one)]
    return [Difference(n, one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)]


def _facts(receipt: Receipt) -> dict[str, Any]:
    """Return what is compared, by the name that a person reads."""
    facts: dict[str, Any] = {
        "status": receipt.status,
        "world size": receipt.world_size,
        "ranks of each host": [len(place["ranks"]) for place in receipt.hosts],
        "launcher": receipt.launcher["name"],
        "library": receipt.library_reason or None,
    }
    facts |= {f"plane {key}": value for key, value in receipt.plane.items()}
    facts |= {f"version of {name}": version for name, version in receipt.versions.items()}
    library = receipt.library or {}
    facts |= {f"library {key}": library.get(key) for key in ("version", "sha256", "size", "path", "found_via")}
    facts |= {f"transport {key}": value for key, value in receipt.transport.items()}
    for name in dict.fromkeys(row["name"] for row in receipt.policy):
        said = [f"{row['value']} (by {row['set_by']})" for row in receipt.policy if row["name"] == name]
        facts[f"policy {name}"] = ", ".join(said)
    facts |= _by_rank(receipt.ranks)
    return facts | {f"check {check['id']}": check["outcome"] for check in receipt.checks}


def _by_rank(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what ranks say of themselves: one value where all say the same, else one a rank."""
    said: dict[str, list[Any]] = {}
    records = list(records)
    for rank, record in enumerate(records):
        environment = {f"environment {name}": value for name, (value, _) in record["environment"].items()}
        settings = {f"setting {name}": value for name, value in record["settings"].items()}
        device = {"device": (record["device"] or {}).get("name")}
        for name, value in {**settings, **environment, **device}.items():
            said.setdefault(name, [None] * len(records))[rank] = value
    return {name: values[0] if all(v == values[0] for v in values) else values for name, values in said.items()}
