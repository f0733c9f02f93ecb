"""Launcher of `baton serve`: starts Ray and the supervisor, waits for the end of the cluster, and then removes
everything that it started.

While the cluster serves, the launcher only watches it. It shows the supervisor's reports, and kills a supervisor that
does not answer; Ray then restarts the supervisor. An error in the launcher itself does not end a cluster that serves.
Runs on the launcher's main thread. `ray` is imported only after its environment variables have been set.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from baton.errors import BatonError, ConfigError, UnavailableError
from baton.process.endless import tell_failure
from baton.settings.place import LOOPBACK
from baton.transport.identity import ClusterSecret
from baton.types import KernelChoice
from deploy.commands.cluster_secrets import keep_secrets
from deploy.commands.http_door import HttpDoor, http_door
from deploy.commands.ray_access import prepare_to_join, prepare_to_start
from deploy.commands.record import (
    ClusterRecord,
    kill_ray,
    load_record,
    process_start,
    record_path,
    store_name,
)
from deploy.config.cluster import ClusterConfig
from deploy.config.environment import restrict_gpus
from deploy.config.file import read_config
from deploy.machine.arrangement import arrange
from deploy.machine.cluster_plan import ClusterPlan
from deploy.machine.doctor import examine, require
from deploy.machine.model_folder import resolve_drafts, resolve_folder
from deploy.machine.resolved_model import ResolvedModel
from deploy.machine.this_machine import prepare_machine

_START_POLL_S = 0.2
"""Seconds between two requests for the supervisor's state while the cluster starts. When the cluster serves, the
heartbeat interval is used instead."""


def serve(args: argparse.Namespace) -> int:
    """Start a cluster and keep it running until the command is interrupted. Return the exit status. Raises BatonError
    if the cluster cannot be started or fails."""
    assignments = [*args.set, *([f"ray.address={args.address}"] if args.address else [])]
    written = read_config(args.config, assignments)
    config = written.config
    console = Console(stderr=True, highlight=False)
    earlier = load_record(config.name)
    if earlier is not None:
        state = "is running" if earlier.launcher_lives else "was not stopped"
        raise ConfigError(f"cluster {config.name} {state}: `baton stop {config.name}`, or set another name")
    model = ResolvedModel(resolve_folder(config.model.name, config.model.cache, console).absolute())
    machine = prepare_machine(console)
    plan = resolve_drafts(arrange(written, model, machine), console)
    config = plan.config
    require(examine(plan, machine))
    if 0 < len(plan.gpus) < len(machine.gpus):
        restrict_gpus([gpu.uuid for gpu in plan.gpus])
    if plan.gpu_note:
        console.print(f"warning: {plan.gpu_note}", markup=False, soft_wrap=True)
    if plan.why:
        console.print(f"arrangement for {plan.why}; set prefill.num_ranks or others to choose yourself", markup=False)
    stopping = threading.Event()
    # Set twice: before, because a half-started Ray could not be ended; and after, because Ray sets handlers of its own.
    with (
        http_door(config, model.folder, _report) as door,
        _interrupts(stopping),
        _ray(config) as found,
        _interrupts(stopping),
    ):
        record, secret = found
        _Launch(plan, machine.kernels, record, secret=secret, door=door).run(stopping)
    _report(f"cluster {config.name} is gone")
    return 0


def _report(line: str) -> None:
    """Show a line to the user. If that fails (on a full disk or a closed pipe, for example), the line is lost, and the
    cluster keeps serving."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


class _Launch:
    """Creates the supervisor as a Ray actor, and watches it until the cluster ends."""

    def __init__(
        self,
        plan: ClusterPlan,
        kernels: tuple[KernelChoice, ...],
        record: ClusterRecord,
        *,
        secret: ClusterSecret,
        door: HttpDoor | None,
    ) -> None:
        self._config = plan.config
        self._door = door
        self._secret = secret
        self._folder = plan.model.folder
        self._kernels = kernels
        self._record = record
        self._endpoint = ""
        """Orchestrator's address that was announced last. Empty before the orchestrator serves."""
        self._fails_since_s: float | None = None
        """Time on the monotonic clock at which the current series of failed calls to Ray began. None while Ray
        answers."""
        self._ray_age_s = _age_s()
        self._num_shown = 0
        self._pid = 0
        self._node_id = ""

    def run(self, stopping: threading.Event) -> None:
        """Run the cluster until `stopping` is set, then end it completely. If the supervisor could not start the
        cluster, raises an error with the supervisor's reason. Raises UnavailableError if Ray no longer answers; in this
        case, workers on other nodes are not ended."""
        from deploy.ray_cluster.supervisor_state import end_supervisor

        is_ray_gone = False
        try:
            if not stopping.is_set():
                self._watch(self._make(), stopping)
        except _RayGoneError:
            is_ray_gone = True
            raise
        finally:
            _report("stopping")
            try:
                if self._door is not None:
                    self._door.close()
            finally:
                if not is_ray_gone:
                    end_supervisor(self._config.name)

    def _make(self) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from deploy.ray_cluster.supervisor import SupervisorActor
        from deploy.ray_cluster.supervisor_state import NAME

        # Prefers the launcher's node, because the orchestrator's address is known there in advance.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        made: Any = ray.remote(SupervisorActor).options(
            name=NAME,
            scheduling_strategy=here,
            namespace=self._config.name,
            lifetime="detached",
            num_cpus=0,
            memory=1,  # asked for nothing, Ray lets any node decide, even one that does not know this one yet
            max_restarts=-1,
            max_concurrency=4,
        )
        store = store_name(record_path(self._config.name))
        try:
            return made.remote(self._config, self._folder, self._kernels, store, self._secret)
        except ValueError as error:
            raise ConfigError(
                f"Ray at {self._record.ray_address} has a cluster {self._config.name}: set another name, or stop it"
            ) from error

    def _watch(self, supervisor: Any, stopping: threading.Event) -> None:
        from ray.exceptions import RayError, RayTaskError

        while not stopping.is_set():
            try:
                self._look(supervisor)
                self._fails_since_s = None
            except _StartFailed:
                raise
            except Exception as error:
                if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                    self._wait_for_ray(error)
                elif self._endpoint:
                    tell_failure("the launcher's watch over the supervisor failed; retrying", error, _report)
                else:
                    raise
            stopping.wait(self._config.supervision.heartbeat_s if self._endpoint else _START_POLL_S)

    def _look(self, supervisor: Any) -> None:
        """Get the supervisor's state and show it. Kill a supervisor that does not answer."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        from deploy.ray_cluster.spawner import kill_process

        try:
            self._show(ray.get(supervisor.state.remote(), timeout=self._config.supervision.dead_after_s))
        except GetTimeoutError:
            if self._pid:  # without a pid, the supervisor starts for the first time or again
                _report("the supervisor is silent: killing it; Ray restarts it")
                try:
                    kill_process(self._pid, self._node_id)
                except OSError as error:  # it may still answer; the cluster serves without it
                    _report(f"the supervisor cannot be killed ({error}): trying again")
                else:
                    self._pid = 0
        except RayActorError:
            self._pid = 0  # Ray restarts it

    def _wait_for_ray(self, error: Exception) -> None:
        """Record an error of Ray. Raises UnavailableError if the cluster has never served, or if Ray has returned only
        errors for `ray.head_wait_s` seconds."""
        where, wait_s, now_s = self._record.ray_folder, self._config.ray.head_wait_s, time.monotonic()
        reason = type(error).__name__
        if not self._endpoint:
            raise UnavailableError(f"Ray is gone ({reason}): see {where or self._record.ray_address}") from error
        if self._fails_since_s is None:
            self._fails_since_s = now_s
            _report(f"Ray does not answer ({reason}): trying again for {wait_s:g} s (ray.head_wait_s)")
        if now_s - self._fails_since_s >= wait_s:
            remedy = f"see {where}" if where else f"`baton stop {self._config.name}` ends what serves on"
            raise _RayGoneError(f"Ray has not answered for {wait_s:g} s ({reason}): {remedy}") from error

    def _show(self, state: Any) -> None:
        """Print the supervisor's new reports. If the supervisor has failed, raises its error."""
        if state.pid != self._pid:
            self._pid, self._node_id, self._num_shown = state.pid, state.node_id, 0
        fresh = state.num_reports - self._num_shown
        for line in state.reports[-fresh:] if fresh else ():
            _report(line)
        self._num_shown = state.num_reports
        if state.phase == "failed":
            raise _StartFailed(state.error)
        if state.phase in ("stopping", "stopped"):
            raise _StartFailed(f"cluster {self._config.name} was stopped by `baton stop --address`")
        if state.phase == "running" and state.endpoint != self._record.endpoint:
            self._serves(state)

    def _serves(self, state: Any) -> None:
        """Write the orchestrator's current address to the cluster's record, and announce it once. If the record cannot
        be saved, a later call retries."""
        is_new, has_moved = state.endpoint != self._endpoint, bool(self._endpoint)
        self._endpoint = state.endpoint
        record = replace(self._record, endpoint=state.endpoint, http="" if self._door is None else self._door.url)
        try:
            record.save()
        except OSError as error:
            if is_new:
                _report(f"the cluster's record cannot be saved ({error}): trying again; `baton status` needs it")
        else:
            self._record = record
        if not is_new:
            return
        age_s = _age_s()
        took = f" ({age_s:.1f} s after the start, {age_s - self._ray_age_s:.1f} s after Ray)"
        text = f"ready: clients may connect to {state.endpoint}; Ctrl-C ends the cluster"
        _report(text if has_moved else text + took)
        if self._door is not None:
            self._door.serve(state.endpoint, state.model)


def _age_s() -> float:
    """Return the seconds since this process started."""
    started_s = int(process_start(os.getpid())) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


class _StartFailed(BatonError):
    """Error: the supervisor could not start the cluster. The text is the supervisor's reason."""


class _RayGoneError(UnavailableError):
    """Error: Ray has stopped answering after the cluster had started to serve."""


@contextlib.contextmanager
def _ray(config: ClusterConfig) -> Iterator[tuple[ClusterRecord, ClusterSecret]]:
    """Connect to Ray, write the cluster's record and make its secrets. At the end of the `with` block, or if this
    fails, remove the record and the secrets, and end a Ray that was started here. If a Ray that was joined no longer
    answers, record and secrets are kept for `baton stop`."""
    folder = "" if config.ray.address else tempfile.mkdtemp(prefix="baton-ray-")
    pid = os.getpid()
    record = ClusterRecord(config.name, pid, process_start(pid), config.ray.address, folder)
    is_over = True
    try:
        record.save()  # saved before any process is started
        secret = ClusterSecret.new()
        token = keep_secrets(record_path(config.name), secret)
        if folder:
            prepare_to_start(token, config.worker_host or LOOPBACK)
        else:
            prepare_to_join(config.ray.address)
        _report("starting Ray" if folder else f"joining Ray at {config.ray.address}")
        record = ClusterRecord(config.name, pid, record.launcher_started, _connect(config, folder), folder)
        record.save()
        _report(f"Ray is up, {_age_s():.1f} s after the start")
        yield record, secret
    except _RayGoneError:
        is_over = bool(folder)
        raise
    finally:
        if (imported := sys.modules.get("ray")) is not None:  # a Ray that cannot be imported has nothing to end
            imported.shutdown()
        if folder:
            kill_ray(folder)  # shutdown only leaves a Ray that `ray.init` has not started
        if is_over:
            record.remove()


def _connect(config: ClusterConfig, folder: str) -> str:
    """Start a Ray with its files below `folder`, to which other users have no access, or join the configured Ray.
    Return Ray's address."""
    import ray
    from ray.exceptions import AuthenticationError

    try:
        address = _start_ray(config, Path(folder)) if folder else config.ray.address
        context: Any = ray.init(address, namespace=config.name, configure_logging=False, log_to_driver=False)
    except AuthenticationError as error:
        where = config.ray.address or "this machine"
        raise UnavailableError(f"Ray at {where} asks for its token: set RAY_AUTH_TOKEN_PATH to its file") from error
    except Exception as error:
        # Ray raises a bare Exception when its processes do not come up in time
        known = OSError | RuntimeError | ValueError | subprocess.SubprocessError
        if type(error) is not Exception and not isinstance(error, known):
            raise
        where = config.ray.address or "this machine"
        reason = str(error).strip().splitlines()[0]
        raise UnavailableError(f"Ray on {where} cannot be reached: {reason}: check ray.address") from error
    return str(context.address_info["address"])


def _start_ray(config: ClusterConfig, folder: Path) -> str:
    """Start a Ray with its files below `folder`. Return its address."""
    from deploy.ray_cluster.head import start_head

    num_cores = os.cpu_count() or 1
    return start_head(
        folder / "ray",  # Ray opens its own folders to all users
        declared_pools(config, num_cores),
        num_cpus=num_cores,
        object_store_bytes=config.ray.object_store_mib * 2**20,
    )


def declared_pools(config: ClusterConfig, num_cores: int) -> dict[str, float]:
    """Return the number of workers of each role that Ray may run on a machine with `num_cores` cores. The keys are the
    names of Ray's custom resources, such as `baton_prefill`.

    The larger of two numbers is returned. The first is the number of workers whose threads fit on the cores. The second
    is the number of workers in all groups that are configured or that the autoscaler may start, and in one extra group.
    The extra group serves while another group is reloaded.
    """
    asked = {"prefill": config.prefill.num_ranks, "generate": 1}
    threads = {"prefill": config.prefill.num_threads, "generate": config.generate.num_threads or num_cores}
    return {
        f"baton_{role}": float(max((config.most_groups[role] + 1) * size, num_cores // threads[role]))
        for role, size in asked.items()
    }


@contextlib.contextmanager
def _interrupts(stopping: threading.Event) -> Iterator[None]:
    """Set `stopping` on SIGINT and SIGTERM while the `with` block runs. Signals after the first one have no effect."""

    def ask(number: int, frame: FrameType | None) -> None:
        stopping.set()

    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
