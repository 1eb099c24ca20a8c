"""Rollouts by inference servers over HTTP: launch or connect to them, and supervise them.

The trainer's thread only waits; requests and supervision run on an event loop in another thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from lit_grpo.concurrency import (
    EventLoopThread,
    gather_or_cancel,
    is_done,
    take_from,
    wait_for,
)
from lit_grpo.distributed.ranks import any_failure, gather_objects, get_rank
from lit_grpo.policy.files.loading import max_positions
from lit_grpo.rollout.engine import (
    LOOK_SECONDS,
    EngineFailed,
    RolloutEngine,
    SampledPolicy,
    Sampling,
)
from lit_grpo.rollout.requests import Sample, group_requests, to_completion
from lit_grpo.rollout.server.addresses import check_servers, check_shared_servers
from lit_grpo.rollout.server.api import Launch, ServerAPI
from lit_grpo.rollout.server.api_key import check_variable, choose_key
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.directory import EngineDirectory
from lit_grpo.rollout.server.dispatch import Dispatcher, RequestLimits
from lit_grpo.rollout.server.launching import (
    check_program,
    choose_ports,
    launched_url,
    process_starters,
    served_model,
    warn_of_public_address,
)
from lit_grpo.rollout.server.server import Server
from lit_grpo.rollout.server.supervisor import Supervisor
from lit_grpo.rollout.server.weights import TargetWeights
from lit_grpo.rollout.weight_check import ExpectedLogprobs, WeightCheck, expected_logprobs
from lit_grpo.rollout.weights.store import WeightStore
from lit_grpo.rollout.weights.sync import WeightSync, sends_adapter
from lit_grpo.types import Completion, Measurements, Prompt, check_range
from lit_grpo.types.field_types import check_init
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.paths import at_home

T = TypeVar("T")


@checks_keywords
class ServedEngine(RolloutEngine):
    """Base class of the engines that use vLLM or SGLang servers.

    Rank 0 launches, updates and restarts the servers; every rank sends its own requests to them.

    Args:
        api: How to talk to the servers.
        launch: Servers to start; one with default settings if neither this nor ``urls`` is set.
        urls: Servers that are already running, such as ``["http://10.0.0.2:8000"]``. They are not
            stopped at the end.
        api_key_variable: Name, in capitals, of the environment variable with the API key of the
            servers; null if those in ``urls`` require none. Servers that are launched get the key,
            or a random one if this is null.
        directory: Where weights for the servers and the servers' logs are written, commonly
            ``${run_dir}/engine``. Servers on other machines must see it under the same path. Null
            for a temporary directory, which is removed at the end unless the engine failed.
        weight_sync: ``full`` sends all weights, with an adapter merged into them; ``adapter`` only
            the adapter; ``auto`` only the adapter if there is one and nothing else is trained.
        request_timeout: Seconds without a new token after which a request fails.
        request_retries: How often a failed request is retried before its completions are given up.
            Requests that were running on a server that died are retried without limit.
        max_concurrency: Completions that each process of the run may have running on one server.
        weight_check: How the trainer checks that a server samples from the policy's weights.
        supervision: How servers are watched and restarted.

    Raises:
        UserError: settings that are out of range or contradict each other.
    """

    overlaps_updates = True

    @abstractmethod
    def __init__(
        self,
        api: ServerAPI,
        *,
        launch: Launch | None = None,
        urls: list[str] | None = None,
        api_key_variable: str | None = None,
        directory: str | None = None,
        weight_sync: WeightSync = "auto",
        request_timeout: float = 600.0,
        request_retries: int = 3,
        max_concurrency: int = 256,
        weight_check: WeightCheck = WeightCheck(),  # noqa: B008 - frozen
        supervision: Supervision = Supervision(),  # noqa: B008 - frozen
    ) -> None:
        key = "model.engine.init_args"
        check_init(key, ServedEngine, locals())
        check_servers(launch, urls or [], directory)
        check_variable(api_key_variable)
        check_range(f"{key}.request_timeout", request_timeout, above=0)
        check_range(f"{key}.request_retries", request_retries, at_least=0)
        check_range(f"{key}.max_concurrency", max_concurrency, at_least=1)
        self.api = api
        self.launch = None if urls else launch or Launch()
        self.urls = urls or []
        self.api_key_variable = api_key_variable
        self.weight_sync = weight_sync
        self.weight_check = weight_check
        self.supervision = supervision
        self.request_timeout = request_timeout
        self.limits = RequestLimits(retries=request_retries, max_concurrency=max_concurrency)
        self._configured_directory = None if directory is None else at_home(directory)
        self._loop: EventLoopThread | None = None
        self._num_updates = 0
        self._running: set[Future[Any]] = set()

    def check_processes(self, num_processes: int, num_nodes: int) -> None:
        """Check that all machines of the run can reach the servers and their files.

        Raises:
            UserError: they cannot.
        """
        if num_nodes > 1:
            check_shared_servers(num_nodes, self.launch, self.urls, self._configured_directory)

    def check_installation(self) -> None:
        """Check that the servers can be started.

        Raises:
            UserError: they cannot.
        """
        if self.launch is not None:
            check_program(self.launch, self.api.package)

    def start(self, policy: SampledPolicy) -> None:
        """Start or connect to the servers; they load while the run prepares the rest."""
        if self._loop is not None:
            return
        self._is_rank_zero = get_rank() == 0
        self._is_adapter_sent = sends_adapter(policy.model, self.weight_sync)
        dtype = self.launch.dtype if self.launch else None
        self._dtype = dtype or self.default_dtype(policy)
        ports, api_key = self._choose_ports_and_key()
        self._directory = EngineDirectory(
            self._configured_directory, is_rank_zero=self._is_rank_zero
        )
        self._weight_store = WeightStore(
            self._directory.weights,
            dtype=getattr(torch, self._dtype),
            is_adapter=self._is_adapter_sent,
            in_files=self.api.reads_files,
            is_writer=self._is_rank_zero,
        )
        servers = self._make_servers(policy, ports, api_key)
        self._loop = EventLoopThread("rollouts")
        self._supervisor = self._run(self._start_supervisor(servers))

    def _choose_ports_and_key(self) -> tuple[list[int], str | None]:
        """Return what rank 0 chose: ports for the servers to launch, and the API key."""
        chosen: tuple[list[int], str | None] = ([], None)
        if self._is_rank_zero:
            ports = choose_ports(self.launch) if self.launch else []
            chosen = ports, choose_key(self.api_key_variable, is_launched=self.launch is not None)
        return gather_objects(chosen)[0]

    def _make_servers(
        self, policy: SampledPolicy, ports: Sequence[int], api_key: str | None
    ) -> list[Server]:
        """Return the servers to use.

        Those that this rank launches get a function that starts their process.
        """
        urls, starters = self.urls, None
        if self.launch is not None:
            urls = [launched_url(self.launch.host, port) for port in ports]
            model = served_model(
                policy,
                self._directory.model,
                dtype=self._dtype,
                with_adapters=self._is_adapter_sent,
                is_writer=self._is_rank_zero,
            )
            if self._is_rank_zero:
                assert api_key is not None, "a launched server has a key"
                logs, guard = self._directory.path, self.api.guard(api_key, self._directory.api_key)
                starters = process_starters(self.api, self.launch, model, ports, logs, guard)
        for url in urls:
            warn_of_public_address(url)
        return [
            Server(
                url,
                self.api,
                self.supervision,
                self.request_timeout,
                starters[number] if starters else None,
                api_key=api_key,
                is_rank_zero=self._is_rank_zero,
            )
            for number, url in enumerate(urls)
        ]

    async def _start_supervisor(self, servers: Sequence[Server]) -> Supervisor:
        dispatcher = Dispatcher(servers, self.api, self.limits)
        note, is_rank_zero = self._directory.failure_note, self._is_rank_zero
        supervisor = Supervisor(
            servers, dispatcher, self.supervision, note, is_rank_zero=is_rank_zero
        )
        supervisor.start()
        return supervisor

    def close(self) -> None:
        """Stop the servers that were launched here, and remove the weights written for them."""
        if self._loop is None:
            return
        for running in list(self._running):
            running.cancel()
        self._run(self._supervisor.close())
        self._loop.close()
        self._loop = None
        self.version = -1
        self._directory.close(has_failed=self._supervisor.has_failed)

    def health(self) -> bool:
        return any(server.is_ready for server in self._supervisor.servers)

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens that the servers have streamed of this process's unfinished completions."""
        return sum(server.load.num_unfinished_tokens for server in self._supervisor.servers)

    def describe_pending(self) -> str:
        """Return how many completions of this process are at each server, and how many wait."""
        supervisor = self._supervisor
        parts = [
            f"{server.load.num_running} completions are at {server.url}"
            f"{'' if server.is_ready else ', which is not ready'}"
            for server in supervisor.servers
        ]
        return ", ".join([*parts, f"{supervisor.dispatcher.num_waiting} wait for a server"])

    def observe(self) -> Measurements:
        """Return what happened since the last call, and the share of servers that are ready."""
        supervisor, dispatcher = self._supervisor, self._supervisor.dispatcher
        totals = {"rollout/retries": float(dispatcher.num_retries)}
        if self._is_rank_zero:  # the other ranks see the same restarts
            totals["rollout/restarts"] = float(supervisor.num_restarts)
        means = {
            "rollout/ready_fraction": [float(server.is_ready) for server in supervisor.servers],
            "sampler/weight_check_difference": supervisor.check_differences,
        }
        dispatcher.num_retries, supervisor.num_restarts, supervisor.check_differences = 0, 0, []
        return Measurements(totals=totals, means=means)

    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Save the weights, make the servers load them, and check that they sample from them."""
        self._policy = policy
        if version == self.version:
            return
        in_use_by_rank = gather_objects(self._run(self._supervisor.announce_version(version)))
        in_use = frozenset().union(*in_use_by_rank)
        target = TargetWeights(
            update=self._weight_store.save(policy, version),
            expected=self._expected_logprobs(policy),
            is_check_due=self.weight_check.is_due(self._num_updates),
            versions_in_use=in_use,
        )
        # Rank 0 updates the servers first; only then do the other ranks wait for them.
        for is_our_turn in (self._is_rank_zero, not self._is_rank_zero):
            failure = any_failure(self._update_servers(target) if is_our_turn else self._stand_by())
            if failure:
                raise EngineFailed(failure)
        # Keep the previous version: a server that is starting may still be reading it.
        self._weight_store.remove_all_but({self.version, version} | in_use)
        self._num_updates += 1
        self.version = version

    def _expected_logprobs(self, policy: SampledPolicy) -> ExpectedLogprobs:
        lengths = [
            self.launch.max_model_len if self.launch else None,
            max_positions(policy.model.config),
        ]
        return expected_logprobs(
            policy,
            self.weight_check,
            temperature=self.api.check_temperature,
            dtype=self._dtype,
            max_length=min((one for one in lengths if one), default=None),
        )

    def _update_servers(self, target: TargetWeights) -> str:
        """Return why no server could be updated; empty if one was."""
        update = self._submit(self._supervisor.update_weights(target))
        try:
            while not all(gather_objects(is_done(update, LOOK_SECONDS))):
                self.on_wait()
            update.result()
        except EngineFailed as error:
            return str(error)
        finally:
            update.cancel()
        return ""

    def _stand_by(self) -> str:
        """Wait with the ranks that update servers; return no failure."""
        while not all(gather_objects(True)):
            self.on_wait()
        return ""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Send one request per prompt, or one per completion if the server requires that."""
        self.api.check_sampling(sampling)
        results: SimpleQueue[Any] = SimpleQueue()
        requests = group_requests(self._policy, prompts, group_size, sampling, seed)
        coroutines = [
            self._supervisor.dispatcher.sample(request, partial(_put, results, number * group_size))
            for number, request in enumerate(requests)
        ]
        running = self._submit(gather_or_cancel(coroutines))
        running.add_done_callback(results.put)
        self._running.add(running)
        try:
            while (result := take_from(results)) is not running:
                row, sample = result
                yield row, to_completion(sample, self._policy.tokenizer, sampling)
            running.result()
        finally:
            running.cancel()
            self._running.discard(running)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        assert self._loop is not None, "the engine is not started"
        return self._loop.submit(coroutine)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return wait_for(self._submit(coroutine))


def _put(results: SimpleQueue[Any], first_row: int, index: int, sample: Sample | str) -> None:
    results.put((first_row + index, sample))
