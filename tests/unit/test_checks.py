"""The comparison of what ranks said: each check on its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from helpers.records import device, make_record, make_world

from butter_mpi.checks import resolve_plane
from butter_mpi.findings import Finding
from butter_mpi.launch import LaunchInfo, read_launch
from butter_mpi.preflight import judge


def told(records: list[dict[str, Any]], check: str | None = None) -> list[Finding]:
    """The findings that a person must see."""
    found = [f for f in judge(records).findings if f.severity != "info"]
    return [f for f in found if f.check == check] if check else found


def launch_of(env: dict[str, str], **changes: Any) -> dict[str, Any]:
    """The fields of a record that an environment decides."""
    return {"launch": asdict(read_launch(env)), **changes}


def values(**by_rank: str | None) -> dict[int, dict[str, Any]]:
    """Per rank (``r0=...``) the value of NCCL_PROTO."""
    return {int(rank[1:]): {"env": {"NCCL_PROTO": value}} for rank, value in by_rank.items() if value is not None}


@pytest.mark.parametrize("plane", ["host", "nccl"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_that_agree_have_nothing_to_tell(plane: str, size: int) -> None:
    """A sound start is ok, and every check says that it agrees or does not apply."""
    report = judge(make_world(size, plane=plane))
    assert report.ok and report.plane == ("solo" if size == 1 else plane) and report.world_size == size
    assert {f.outcome for f in report.findings} <= {"agree", "does not apply"}


def test_all_findings_come_at_once() -> None:
    """Faults of different kinds are one report, each with its remedy."""
    ranks = {1: {"env": {"NCCL_PROTO": "LL"}, "plan": {"operation": "barrier"}, "settings": {"action": "abort"}}}
    found = told(make_world(3, ranks=ranks))
    assert {f.check for f in found} == {"settings", "plan", "environment"}
    assert all(f.remedy for f in found)


def test_report_does_not_depend_on_who_judges() -> None:
    """The text is a function of the records alone: nothing of the own rank is in it."""
    records = make_world(4, ranks=values(r1="LL", r3="Simple"))
    assert judge(records) == judge([dict(r) for r in records])
    assert judge(records).text() == judge([dict(r) for r in records]).text()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"r0": "LL"}, 'NCCL_PROTO: "LL" on rank 0, unset on ranks 1-3'),
        ({"r3": "LL"}, 'NCCL_PROTO: unset on ranks 0-2, "LL" on rank 3'),
        (
            {"r0": "LL", "r1": "LL", "r2": "Simple"},
            'NCCL_PROTO: "LL" on ranks 0-1, "Simple" on rank 2, unset on rank 3',
        ),
        ({"r0": ""}, 'NCCL_PROTO: "" on rank 0, unset on ranks 1-3'),
    ],
)
def test_variable_that_must_be_alike_is_told_by_value_and_rank(ranks: dict[str, str], message: str) -> None:
    """The variable, every value and every rank are named; an empty value is not unset."""
    (finding,) = told(make_world(4, ranks=values(**ranks)))
    assert (finding.check, finding.outcome, finding.severity) == ("environment", "differ", "error")
    assert finding.message == message


def test_remedy_forwards_with_the_launcher_of_this_job() -> None:
    """The remedy for a variable that was not handed on is this launcher's option, with the value."""
    (finding,) = told(make_world(2, ranks=values(r0="LL")))
    assert finding.remedy == "give every rank the same value: mpirun -genv NCCL_PROTO LL ..."
    records = make_world(2, ranks=values(r0="LL"), launch=asdict(LaunchInfo("openmpi", 2)))
    assert told(records)[0].remedy.endswith("mpirun -x NCCL_PROTO=LL ...")


def test_value_from_a_file_names_the_file() -> None:
    """Where a configuration file gave the value, the file is in the message; equal values do not differ by source."""
    here = {"environment": {"NCCL_PROTO": ["LL", "/etc/nccl.conf"]}}
    there = {"environment": {"NCCL_PROTO": ["LL", "environment"]}}
    assert told(make_world(2, ranks={0: here, 1: there})) == []
    (finding,) = told(make_world(2, ranks={0: here}))
    assert finding.message == 'NCCL_PROTO: "LL" from /etc/nccl.conf on rank 0, unset on rank 1'


def test_hidden_value_is_compared_and_never_offered() -> None:
    """A value that may be a secret appears in no message or remedy, and still differs."""
    ranks = {0: {"env": {"NCCL_FOO_TOKEN": "<hidden: sha256 aaaaaaaaaaaa, 9 characters>"}}}
    (finding,) = told(make_world(2, ranks=ranks))
    assert finding.message.startswith('NCCL_FOO_TOKEN: "<hidden: sha256 aaaaaaaaaaaa, 9 characters>" on rank 0, unset')
    assert finding.remedy.endswith("mpirun -genv NCCL_FOO_TOKEN VALUE ...")


def test_debug_variable_that_differs_is_a_warning() -> None:
    """Only logging differs: the start goes on, and says so."""
    records = make_world(2, ranks={0: {"env": {"NCCL_DEBUG": "INFO"}}})
    (finding,) = told(records)
    assert finding.severity == "warning" and finding.message == 'NCCL_DEBUG: "INFO" on rank 0, unset on rank 1'
    assert judge(records).ok


@pytest.mark.parametrize("name", ["NCCL_DEBUG_FILE", "NCCL_VERSION", "NCCL_CONF_FILE"])
def test_variable_that_differs_by_nature_is_no_finding(name: str) -> None:
    """File names, and what container images say of themselves, may be what they like."""
    assert told(make_world(2, ranks={0: {"env": {name: "a"}}, 1: {"env": {name: "b"}}})) == []


def interfaces(per_host: bool, hosts: str, names: str) -> list[dict[str, Any]]:
    """Records of ranks with a host and an interface name each."""
    ranks: dict[int, dict[str, Any]] = {
        rank: {"host": host, "env": {"NCCL_SOCKET_IFNAME": name}}
        for rank, (host, name) in enumerate(zip(hosts.split(), names.split(), strict=True))
    }
    return make_world(len(ranks), ranks=ranks, settings={"per_host_interfaces": per_host})


@pytest.mark.parametrize(
    ("per_host", "hosts", "names", "refused"),
    [
        (False, "a a b b", "eno1 eno1 eth0 eth0", True),
        (True, "a a b b", "eno1 eno1 eth0 eth0", False),
        (True, "a a b b", "eno1 eth0 eth0 eth0", True),
        (True, "a b a b", "eno1 eth0 eno1 eth0", False),
        (True, "a a b b", "eno1 eno1 eno1 eno1", False),
    ],
)
def test_interface_names_may_differ_between_hosts_on_request(
    per_host: bool, hosts: str, names: str, refused: bool
) -> None:
    """One name a host is accepted only with the opt-in, and two names on one host never."""
    found = told(interfaces(per_host, hosts, names))
    assert [f.check for f in found] == ["environment"] * refused
    assert all("per_host_interfaces=True" in f.remedy for f in found)


def test_opt_in_for_interfaces_covers_no_other_variable() -> None:
    """A protocol that differs between hosts is refused all the same."""
    ranks: dict[int, dict[str, Any]] = {0: {"host": "a", "env": {"NCCL_PROTO": "LL"}}, 1: {"host": "b"}}
    assert [f.check for f in told(make_world(2, ranks=ranks, settings={"per_host_interfaces": True}))] == [
        "environment"
    ]


def test_host_identities_may_differ_only_where_a_gpu_is_shared() -> None:
    """``NCCL_HOSTID`` per rank is what sharing needs; without sharing it must be alike."""
    ranks = {0: {"env": {"NCCL_HOSTID": "a"}}, 1: {"env": {"NCCL_HOSTID": "b"}}}
    assert [f.check for f in told(make_world(2, ranks=ranks))] == ["environment"]
    assert told(make_world(2, ranks=ranks, settings={"share_gpu": True})) == []


@pytest.mark.parametrize("value", ["x" * 10**6, "a\x1b[31mb", "a\nb", "\udcff", 'a"b'])
def test_remedy_shows_no_value_that_the_message_does_not(value: str) -> None:
    """A value that a message cuts or escapes is not in the command line of the remedy either."""
    (finding,) = told(make_world(2, ranks={1: {"environment": {"NCCL_PROTO": [value, "a\nfile"]}}}))
    assert len(finding.message + finding.remedy) < 600
    assert (finding.message + finding.remedy).isprintable()
    assert "-genv NCCL_PROTO VALUE ..." in finding.remedy


def test_thousands_of_variables_do_not_drown_the_message() -> None:
    """The first 20 errors and warnings each are told one by one, the rest in one finding each."""
    names = [f"NCCL_{number:05}" for number in range(5000)]
    ranks = {1: {"env": {**dict.fromkeys(names, "1"), "NCCL_DEBUG": "INFO"}}}
    records = make_world(3, ranks=ranks)
    *first, rest, warning = told(records)
    assert [f.message.split(":")[0] for f in first] == names[:20]
    assert rest.message.startswith("4980 more variables differ: NCCL_00020, NCCL_00021, ")
    assert rest.message.endswith("NCCL_00039 and 4960 others")
    assert (rest.severity, warning.severity) == ("error", "warning")
    assert len(judge(records).text()) < 10_000


def test_single_rank_compares_no_environment() -> None:
    """Alone there is nothing to be alike."""
    report = judge([make_record(env={"NCCL_PROTO": "LL"})])
    assert {f.check: f.outcome for f in report.findings}["environment"] == "does not apply"


def test_package_versions_are_compared() -> None:
    """Two builds of butter_mpi in one job are refused."""
    (finding,) = told(make_world(2, ranks={1: {"package": "9.9"}}))
    assert finding.check == "package" and "9.9 (record 1) on rank 1" in finding.message


def test_other_record_version_is_the_only_finding() -> None:
    """Records of different meaning are not compared further: the build is the fault."""
    records = make_world(2, ranks={1: {"record": 2, "env": {"NCCL_PROTO": "LL"}}})
    records[1] = {"record": 2, "package": "9.9"}
    report = judge(records)
    assert [f.check for f in report.findings] == ["package"] and not report.ok


@pytest.mark.parametrize("ranks", [{1: {"rank": 0}}, {1: {"rank": 5}}, {0: {"world_size": 3}}])
def test_ranks_must_be_a_permutation(ranks: dict[int, dict[str, Any]]) -> None:
    """A rank twice, out of range, or of another world is refused."""
    assert "assignment" in [f.check for f in told(make_world(2, ranks=ranks))]


def test_more_ranks_claimed_than_mpi_has_is_refused() -> None:
    """The launcher's count against MPI's is the false green at size one; cause and remedy are told."""
    wrong = launch_of({"PMI_SIZE": "2", "PMI_RANK": "1"}, mpi_library="Open MPI v5.0.11, package")
    (finding,) = told([make_record(**wrong)])
    assert (finding.check, finding.severity) == ("launcher", "error")
    assert finding.message.startswith("PMI_SIZE says 2 ranks, but MPI.COMM_WORLD has 1: ")
    assert "mpirun of MPICH or Intel MPI, but mpi4py runs on Open MPI v5.0.11" in finding.message
    assert finding.remedy


def test_step_without_its_plugin_names_the_line_to_try() -> None:
    """Under srun the remedy is the PMI plug-in of this MPI library."""
    env = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
    (finding,) = told([make_record(**launch_of(env, mpi_library="Open MPI v5.0.11"))])
    assert "SLURM_STEP_NUM_TASKS says 4 ranks, but MPI.COMM_WORLD has 1" in finding.message
    assert "srun --mpi=pmix" in finding.remedy


def test_sub_communicator_is_no_false_green() -> None:
    """What counts is the size of COMM_WORLD, not of the communicator that was passed."""
    env = {"PMI_SIZE": "4", "PMI_RANK": "3"}
    assert told([make_record(**launch_of(env), comm_world_size=4, comm_world_rank=3)]) == []


def test_fewer_ranks_claimed_than_mpi_has_is_no_fault() -> None:
    """A launcher inside another one's process leaves the outer one's smaller claim behind."""
    assert told(make_world(2, launch=asdict(read_launch({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"})))) == []


def test_rank_claimed_by_the_launcher_must_be_mpis() -> None:
    """The same size and another rank mean that two jobs met."""
    ranks = {r: launch_of({"PMI_SIZE": "2", "PMI_RANK": str(1 - r)}) for r in range(2)}
    found = told(make_world(2, ranks=ranks))
    assert [f.check for f in found] == ["launcher", "launcher"]
    assert found[0].message.startswith("the launcher says rank 1, but MPI says rank 0")


def test_malformed_launcher_variable_is_told() -> None:
    """The variable, what it may hold and the rank are named."""
    (finding,) = told([make_record(**launch_of({"PMI_SIZE": "two"}))])
    assert finding.message == 'PMI_SIZE must be a whole number, 1 or more; got "two" (rank 0)'


@pytest.mark.parametrize(
    ("env", "size", "warned"),
    [
        ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4"}, 1, True),
        ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "1"}, 1, False),
        ({"SLURM_JOB_ID": "4"}, 1, False),
        ({"SLURM_NTASKS": "4"}, 1, True),
        ({"SLURM_NTASKS": "4"}, 2, False),
        (
            {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            1,
            True,
        ),
        ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, 1, False),
        ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "PMI_SIZE": "1"}, 1, False),
        ({"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "PMI_SIZE": "2"}, 2, False),
    ],
)
def test_alone_outside_any_step_of_a_larger_allocation_is_a_warning(
    env: dict[str, str], size: int, warned: bool
) -> None:
    """Where several tasks were asked for and nothing started them, the process says so."""
    found = told(make_world(size, launch=asdict(read_launch(env))))
    assert [(f.check, f.severity) for f in found] == [("allocation", "warning")] * warned
    assert all("4 tasks" in f.message and "srun" in f.remedy for f in found)


def test_fault_that_one_rank_found_is_everybodys() -> None:
    """A rank's own failure is an error that names the rank; equal failures are one line."""
    ranks = {r: {"failures": ["init: plane must be one of auto, nccl, host; got 'gpu'"]} for r in (1, 2)}
    (finding,) = told(make_world(4, ranks=ranks))
    assert finding.message == "ranks 1-2: init: plane must be one of auto, nccl, host; got 'gpu'"
    assert (finding.outcome, finding.ranks) == ("cannot tell", (1, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plane", "auto"),
        ("share_gpu", True),
        ("start_deadline", 5.0),
        ("collective_deadline", 99.0),
        ("action", "abort"),
    ],
)
def test_settings_must_be_alike(name: str, value: Any) -> None:
    """Every setting is compared, and the remedy names its variable."""
    (finding,) = told(make_world(3, ranks={2: {"settings": {name: value}}}))
    assert finding.check == "settings" and finding.message.startswith(f"{name}: ")
    assert finding.message.endswith(f'"{value}" on rank 2') and f"BUTTER_MPI_{name.upper()}" in finding.remedy


def test_settings_that_a_rank_could_not_read_are_not_compared() -> None:
    """The defaults of a rank with a fault of its own add no second finding."""
    (finding,) = told(make_world(2, ranks={1: {"failures": ["init: bad"], "settings": {"plane": "auto"}}}))
    assert finding.check == "start"


def test_plans_must_be_alike_or_undeclared_on_all() -> None:
    """Another count, and a plan on some ranks only, are refused with both sides."""
    plan = {"operation": "all_reduce", "count": 4, "dtype": "float32", "op": "sum", "root": None}
    (finding,) = told(make_world(2, ranks={0: {"plan": plan}, 1: {"plan": {**plan, "count": 8}}}))
    assert finding.check == "plan" and "count 4" in finding.message and "count 8" in finding.message
    (finding,) = told(make_world(2, ranks={0: {"plan": plan}}))
    assert finding.message.endswith("undeclared on rank 1")
    assert told(make_world(2, plan=plan)) == []


def test_sequences_must_be_alike() -> None:
    """Ranks that have submitted different numbers of collectives do not start together."""
    (finding,) = told(make_world(2, ranks={1: {"sequence": 7}}))
    assert finding.message == "collective sequence: 0 on rank 0, 7 on rank 1"


def test_different_mpi_libraries_are_a_warning() -> None:
    """Two MPI builds that met are told, and may go on."""
    (finding,) = told(make_world(2, ranks={1: {"mpi_library": "MPICH Version: 4.0"}}))
    assert (finding.check, finding.severity) == ("mpi", "warning")


@pytest.mark.parametrize("size", [1, 2])
def test_required_transport_is_refused_without_nccl(size: int) -> None:
    """On the host and solo planes a required transport cannot be told."""
    (finding,) = told(make_world(size, settings={"require_transport": "NET/IB"}))
    assert (finding.check, finding.outcome) == ("transport", "cannot tell")


@pytest.mark.parametrize(
    ("planes", "devices", "expected"),
    [
        ("host host", "", "host"),
        ("auto auto", "", "host"),
        ("auto auto", "0 1", "nccl"),
        ("auto auto", "1", "nccl"),
        ("host host", "0 1", "host"),
        ("nccl nccl", "", "nccl"),
        ("host nccl", "", "nccl"),
        ("host auto", "", "host"),
    ],
)
def test_plane_is_resolved_from_all_ranks(planes: str, devices: str, expected: str) -> None:
    """Auto is nccl with devices and host without; what differs is judged by the stricter rules."""
    having = devices.split()
    records = [
        make_record(rank, 2, plane=plane, device=device(rank) if str(rank) in having else None)
        for rank, plane in enumerate(planes.split())
    ]
    assert resolve_plane(records, 2) == expected
    assert resolve_plane(records[:1], 1) == "solo"
