"""Several processes that train one model: how they join, and how they agree.

Each process runs the same program on its own devices. JAX's coordination
service, which process 0 hosts, introduces them to each other and watches over
their heartbeats. What this module adds:

  joining    a mistake in the flags or an absent process is one clear error
  agreeing   what each finds out for itself (a signal, a damaged file) becomes
             one decision, so that no process goes where the others do not

When a process dies, the others end too: at once if they notice that it is gone,
after `heartbeat_timeout_s` at the latest. One that fails should end by
`os._exit`, since JAX makes a usual exit wait for the others.

With one process every function here does nothing and takes no time.
"""

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Names that JAX gives its ways of finding the processes of a job.
CLUSTERS = ("auto", "slurm", "ompi", "k8s", "mpi4py")

# How often this process has waited, by the name of the place.
_visits: collections.Counter[str] = collections.Counter()


def join_processes(
  *,
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  cluster: str | None = None,
  heartbeat_timeout_s: int = 100,
  start_timeout_s: int = 300,
) -> None:
  """Makes this process one of several, before anything is computed.

  Either all of the first three arguments are given, or `cluster` is, or
  nothing: then there is one process.

  Args:
    coordinator: HOST:PORT of process 0, which listens there.
    num_processes: How many there are.
    process_id: Which of them this is, from 0.
    cluster: Whose environment says the same: one of `CLUSTERS`; "auto" takes
      the first that there is, TPU pods included.
    heartbeat_timeout_s: Seconds of silence after which a process is taken for
      dead, and all end. A process that ends waits for the others as long.
    start_timeout_s: Seconds that the processes wait for each other to start.

  Raises:
    ValueError: Arguments that are incomplete, out of range, or contradict each
      other; or there is no such cluster.
    ConnectionError: The processes did not find each other in time.
  """
  given = {
    "coordinator": coordinator,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  missing = [name for name, value in given.items() if value is None]
  if len(missing) == len(given) and cluster is None:
    return
  if cluster is not None:
    _check_cluster(cluster, given)
  elif missing:
    raise ValueError(
      f"{' and '.join(n for n in given if n not in missing)} without"
      f" {' and '.join(missing)}: give all of {', '.join(given)}, or none for"
      " one process, or cluster to have them found"
    )
  else:
    _check_place(coordinator, num_processes, process_id)
  if heartbeat_timeout_s < 1:
    raise ValueError(
      f"heartbeat_timeout_s = {heartbeat_timeout_s} must be at least 1"
    )
  # Its handler of SIGTERM would hide the signal until training begins, and
  # ours takes its place there.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      coordinator,
      num_processes,
      process_id,
      cluster_detection_method=None if cluster == "auto" else cluster,
      initialization_timeout=start_timeout_s,
      heartbeat_timeout_seconds=heartbeat_timeout_s,
      shutdown_timeout_seconds=heartbeat_timeout_s,
    )
  except ValueError as error:  # What JAX raises if it found nothing.
    raise ValueError(
      f"cluster = {cluster!r} does not describe this process ({error}): start"
      " it by the cluster's own launcher, or give coordinator, num_processes"
      " and process_id"
    ) from error
  except jax.errors.JaxRuntimeError as error:
    raise ConnectionError(
      f"process {process_id} of {num_processes} did not find the others at"
      f" {coordinator} within {start_timeout_s} s: start all of them, and see"
      f" that each reaches this address ({_first_line(error)})"
    ) from error


def is_first() -> bool:
  """Whether this is the process that writes and speaks for all."""
  return jax.process_index() == 0


def all_agree(ok: bool) -> bool:
  """Whether every process says so; all of them call this together."""
  if jax.process_count() == 1:
    return ok
  return bool(np.all(multihost_utils.process_allgather(np.asarray(ok))))


def wait_for_all(name: str, *, timeout_s: float) -> None:
  """Returns when every process has come here, without using a device.

  Args:
    name: Of this place.
    timeout_s: An error is raised after so many seconds.
  """
  # Each wait needs a name of its own.
  _visits[name] += 1
  ocp.multihost.get_barrier_sync_fn()(
    key=f"{name} ({_visits[name]})", timeout_ms=round(1000 * timeout_s)
  )


@contextlib.contextmanager
def first_process_first(name: str, *, timeout_s: float) -> Iterator[None]:
  """Process 0 goes through the block alone, and then the others together.

  For what one process prepares on disk and the others then find there. If it
  fails or dies, the others end as well.

  Args:
    name: Of this block.
    timeout_s: The longest that the others wait.
  """
  if not is_first():
    wait_for_all(name, timeout_s=timeout_s)
  yield
  if is_first():
    wait_for_all(name, timeout_s=timeout_s)


def make_vote(mesh: Mesh) -> Callable[[bool], bool]:
  """A decision that all processes make at the same step.

  Returns:
    A function that each process calls once a step with its own wish. It says
    whether any process had one: with a single process in this call, with
    several in the call before, so that no step waits for the answer.
  """
  if jax.process_count() == 1:
    return lambda wish: wish
  cut = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  any_wish = jax.jit(
    jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec())
  )
  last: jax.Array | None = None

  def vote(wish: bool) -> bool:
    nonlocal last
    answer = last is not None and bool(last)
    wishes = np.full(jax.local_device_count(), wish)
    last = any_wish(jax.make_array_from_process_local_data(cut, wishes))
    return answer

  return vote


def _check_cluster(cluster: str, given: Mapping[str, object]) -> None:
  if cluster not in CLUSTERS:
    raise ValueError(
      f"cluster = {cluster!r} is none of {', '.join(map(repr, CLUSTERS))}"
    )
  extra = [name for name, value in given.items() if value is not None]
  if extra:
    raise ValueError(
      f"cluster = {cluster!r} finds {' and '.join(extra)} itself: give one or"
      " the other"
    )


def _check_place(
  coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
  host, _, port = (coordinator or "").rpartition(":")
  if not host or not port.isdecimal():
    raise ValueError(
      f"coordinator = {coordinator!r} is not HOST:PORT: give the address of"
      " process 0 and a free port on its machine"
    )
  if num_processes is None or num_processes < 1:
    raise ValueError(f"num_processes = {num_processes} must be at least 1")
  if process_id is None or not 0 <= process_id < num_processes:
    raise ValueError(
      f"process_id = {process_id} must be from 0 to num_processes - 1 ="
      f" {num_processes - 1}"
    )


def _first_line(error: Exception) -> str:
  return str(error).split("\n", 1)[0]
