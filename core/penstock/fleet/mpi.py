"""The position of a process that an MPI launcher has started: each even rank keeps parameters, each odd one trains.

No MPI library is used: the launcher's environment has rank and size. Where servers listen is not in it, so a job over
several hosts names them in PADDLE_PSERVERS_IP_PORT_LIST; on one host they get ports from PADDLE_PORT (6174) on.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import SpecError
from penstock.fleet.position import PORT, SERVERS, Position, Role, Variables

PER_NODE = 2
FIRST_PORT = 6174
# Open MPI; MPICH, Intel MPI and Hydra; MVAPICH2; Slurm's own
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


def from_mpi_environ(environ: Mapping[str, str], reader: str) -> Position:
    """Read rank and size. Raises SpecError naming the variable, or saying that no launcher was found."""
    variables = Variables(environ, reader)
    found = next((place for place, name in enumerate(_RANKS) if environ.get(name)), None)
    if found is None:
        raise SpecError(
            f"{reader}: this process was not started by an MPI launcher: none of {', '.join(_RANKS)} is set. Start it "
            "with mpirun -np 4 python SCRIPT; or use PaddleCloudRoleMaker and penstock.distributed.launch_ps",
            pointer=_RANKS[0],
        )
    rank = variables.number(_RANKS[found], "the rank of this process")
    size = variables.number(_SIZES[found], "the number of processes", least=PER_NODE, example="4")
    if size % PER_NODE or rank >= size:
        raise variables.wrong(_SIZES[found], "an even number of processes: a server and a worker each", "4")
    servers = _servers(variables, size, _LOCAL_SIZES[found])
    role = Role.WORKER if rank % PER_NODE else Role.SERVER
    return Position(role, rank // PER_NODE, size // PER_NODE, servers)


def _servers(variables: Variables, size: int, local_name: str) -> tuple[str, ...]:
    count = size // PER_NODE
    if variables.environ.get(SERVERS):
        servers = variables.endpoints(SERVERS, "the parameter servers")
        if len(servers) != count:
            raise variables.wrong(SERVERS, f"{count} servers, one for each two of the {size} processes", "HOST:PORT,…")
        return servers
    if variables.number(local_name, "the number of processes on this host", default=0) != size:
        raise variables.wrong(
            SERVERS,
            f"host:port of {count} parameter servers, because the {size} processes are on several hosts",
            "10.0.0.1:6174,10.0.0.2:6174",
        )
    first = variables.number(PORT, "the port of the first server", least=1, default=FIRST_PORT)
    return tuple(f"127.0.0.1:{first + place}" for place in range(count))
