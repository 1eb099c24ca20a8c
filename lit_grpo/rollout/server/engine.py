"""Rollouts by inference servers over HTTP, whatever their kind: launched or attached to, watched,
restarted, and given weights that are proven to have arrived.

Blocks its caller only; requests, watching and restarts live on an event loop in a thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from lit_grpo.concurrency import EventLoopThread, gather_or_cancel
from lit_grpo.distributed import any_failure, gather_objects, get_rank
from lit_grpo.rollout.engine import EngineFailed, RolloutEngine, SampledPolicy, Sampling
from lit_grpo.rollout.requests import Sample, group_requests, to_completion
from lit_grpo.rollout.server.api import Launch, ServerAPI
from lit_grpo.rollout.server.config import Supervision
from lit_grpo.rollout.server.dispatch import Dispatcher, RequestLimits
from lit_grpo.rollout.server.fleet import Fleet
from lit_grpo.rollout.server.launching import (
    check_url,
    choose_ports,
    is_on_this_machine,
    model_to_serve,
    server_starts,
    warn_of_public_address,
)
from lit_grpo.rollout.server.process import ServerProcess
from lit_grpo.rollout.server.scratch import ScratchDirectory
from lit_grpo.rollout.server.server import Server
from lit_grpo.rollout.server.server_weights import Target
from lit_grpo.rollout.weight_check import LONGEST, ExpectedLogprobs, Proof, expect
from lit_grpo.rollout.weights.files import WeightSync, sends_adapter
from lit_grpo.rollout.weights.store import WeightStore
from lit_grpo.types import Completion, Measurements, Prompt, UserError

T = TypeVar("T")
FAILURE_NOTE = "failed.txt"


class ServedEngine(RolloutEngine):
    """What the engines for vLLM and SGLang servers share.

    Rank 0 launches, updates and restarts the servers; the others send requests to them.

    Args:
        api: How to talk to them.
        launch: Servers to start; one with default settings when neither this nor urls is given.
        urls: Servers that run already, such as ``["http://10.0.0.2:8000"]``. They are not ended.
        directory: Where weights on their way and the servers' logs are written, commonly
            ``${run_dir}/engine``. Servers on other machines must see it under the same path.
            Null for one that is removed at the end, unless the engine failed.
        weight_sync: ``full`` writes all weights, with an adapter merged into them; ``adapter`` the
            adapter alone; ``auto`` the adapter where there is one and nothing else is trained.
        request_timeout: Seconds without a further token after which a request is given up.
        request_retries: Further attempts at a request that a server failed at; attempts that ended
            with their server do not count.
        max_concurrency: Completions that one server is asked for at a time, by each process of
            the run.
        proof: How it is proven that a server holds the policy's weights.
        supervision: How servers are watched and restarted.

    Raises:
        ValueError: contradicting or impossible settings.
    """

    def __init__(
        self,
        api: ServerAPI,
        *,
        launch: Launch | None = None,
        urls: list[str] | None = None,
        directory: str | None = None,
        weight_sync: WeightSync = "auto",
        request_timeout: float = 600.0,
        request_retries: int = 3,
        max_concurrency: int = 256,
        proof: Proof = Proof(),  # noqa: B008 - frozen
        supervision: Supervision = Supervision(),  # noqa: B008 - frozen
    ) -> None:
        if launch is not None and urls:
            raise UserError(
                f"launch and urls exclude each other, got {launch} and {urls} (servers are either "
                "started or attached to). Set one of them in model.engine.init_args."
            )
        for url in urls or []:
            check_url(url)
        if directory is None and not all(map(is_on_this_machine, urls or [])):
            raise UserError(
                f"directory must be set for servers on other machines, got null and {urls} (they "
                "read the weights from there). Set model.engine.init_args.directory to one that "
                "all machines see under the same path."
            )
        if request_timeout <= 0 or request_retries < 0 or max_concurrency < 1:
            raise UserError(
                "request_timeout must be > 0, request_retries >= 0 and max_concurrency >= 1, got "
                f"{request_timeout}, {request_retries} and {max_concurrency}. Set them in "
                "model.engine.init_args."
            )
        self.api = api
        self.launch = None if urls else launch or Launch()
        self.urls = urls or []
        self.weight_sync = weight_sync
        self.proof = proof
        self.supervision = supervision
        self.request_timeout = request_timeout
        self.limits = RequestLimits(retries=request_retries, max_concurrency=max_concurrency)
        self._configured_directory = directory
        self._loop: EventLoopThread | None = None
        self._num_updates = 0
        self._running: set[Future[Any]] = set()
        self._scratch: ScratchDirectory | None = None

    overlaps_updates = True

    # The life of the engine

    def start(self, policy: SampledPolicy) -> None:
        """Launch or look for the servers; they come up while the run goes on getting ready."""
        if self._loop is not None:
            return
        self._is_lead = get_rank() == 0
        self._is_adapter_sent = sends_adapter(policy.model, self.weight_sync)
        ports = gather_objects(choose_ports(self.launch) if self.launch and self._is_lead else [])
        self._directory = Path(gather_objects(self._make_directory())[0]).absolute()
        dtype = self.launch.dtype if self.launch else None
        self._dtype = dtype or str(policy.model.dtype).removeprefix("torch.")
        self._weight_store = WeightStore(
            self._directory / "weights",
            dtype=getattr(torch, self._dtype),
            is_adapter=self._is_adapter_sent,
            in_files=self.api.reads_files,
            is_keeper=self._is_lead,
        )
        urls, starts = self._sites(policy, ports[0])
        for url in urls:
            warn_of_public_address(url)
        self._loop = EventLoopThread("rollouts")
        self._fleet = self._run(self._open_fleet(urls, starts))

    def _make_directory(self) -> str:
        """The lead's is everybody's; a note of an earlier failure would end this run."""
        if not self._is_lead:
            return ""
        if self._configured_directory is None:
            self._scratch = ScratchDirectory("lit-grpo-engine-")
            return str(self._scratch.path)
        Path(self._configured_directory, FAILURE_NOTE).unlink(missing_ok=True)
        return self._configured_directory

    def _sites(
        self, policy: SampledPolicy, ports: Sequence[int]
    ) -> tuple[list[str], list[Callable[[], ServerProcess]] | None]:
        """Addresses, and what starts a server at each."""
        if self.launch is None:
            return list(self.urls), None
        host = f"[{self.launch.host}]" if ":" in self.launch.host else self.launch.host
        urls = [f"http://{host}:{port}" for port in ports]
        if not self._is_lead:
            return urls, None
        path, with_adapters = self._directory / "model", self._is_adapter_sent
        model = model_to_serve(policy, path, dtype=self._dtype, with_adapters=with_adapters)
        return urls, server_starts(self.api, self.launch, model, ports, self._directory)

    async def _open_fleet(
        self, urls: Sequence[str], starts: Sequence[Callable[[], ServerProcess]] | None
    ) -> Fleet:
        servers = [
            Server(
                url, self.api, self.supervision, self.request_timeout,
                starts[number] if starts else None, is_led=not self._is_lead,
            )
            for number, url in enumerate(urls)
        ]  # fmt: skip
        note = self._directory / FAILURE_NOTE
        dispatcher = Dispatcher(servers, self.api, self.limits)
        fleet = Fleet(servers, dispatcher, self.supervision, note, is_lead=self._is_lead)
        fleet.start()
        return fleet

    def close(self) -> None:
        """End the servers that were launched here; remove the weights that were on their way."""
        if self._loop is None:
            return
        for running in list(self._running):
            running.cancel()
        self._run(self._fleet.close())
        self._loop.close()
        self._loop = None
        self.version = -1
        if self._is_lead:
            for name in ("weights", "model"):
                shutil.rmtree(self._directory / name, ignore_errors=True)
            if self._scratch is not None:
                (self._scratch.keep if self._fleet.has_failed else self._scratch.remove)()

    def health(self) -> bool:
        return any(server.is_ready for server in self._fleet.servers)

    def observe(self) -> Measurements:
        """Retries and restarts since the last call, the servers that are well, and the proofs."""
        fleet, dispatcher = self._fleet, self._fleet.dispatcher
        totals = {"rollout/retries": float(dispatcher.num_retries)}
        if self._is_lead:  # the others see the same restarts
            totals["rollout/restarts"] = float(fleet.num_restarts)
        means = {
            "rollout/ready_fraction": [float(server.is_ready) for server in fleet.servers],
            "sampler/proof_difference": fleet.differences,
        }
        dispatcher.num_retries, fleet.num_restarts, fleet.differences = 0, 0, []
        return Measurements(totals=totals, means=means)

    # Weights

    def load_weights(self, policy: SampledPolicy, version: int) -> None:
        """Write the weights where the servers read them, have them read, and see them proven."""
        self._policy = policy
        if version == self.version:
            return
        in_use = frozenset().union(*gather_objects(self._run(self._fleet.expect_version(version))))
        target = Target(
            update=self._weight_store.put(policy, version),
            expectation=self._expectation(policy),
            is_proof_due=self.proof.is_due(self._num_updates),
            versions_in_use=in_use,
        )
        # The others' servers have the weights when rank 0 has given them.
        failure = gather_objects(self._switch(target) if self._is_lead else "")[0]
        if why := any_failure(failure if self._is_lead or failure else self._switch(target)):
            raise EngineFailed(why)
        # A server that comes up this moment may still read those of the last update.
        self._weight_store.remove_all_but({self.version, version} | in_use)
        self._num_updates += 1
        self.version = version

    def _expectation(self, policy: SampledPolicy) -> ExpectedLogprobs:
        lengths = [
            self.launch.max_model_len if self.launch else None,
            getattr(policy.model.config, "max_position_embeddings", None),
        ]
        return expect(
            policy,
            self.proof,
            temperature=self.api.temperature_of_logprobs,
            dtype=self._dtype,
            max_length=min((one for one in lengths if one), default=LONGEST),
        )

    def _switch(self, target: Target) -> str:
        """Why no server has the weights; empty when one has."""
        try:
            self._run(self._fleet.switch(target))
        except EngineFailed as error:
            return str(error)
        return ""

    # Rollouts

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Every prompt is one request for its G completions, where the server can do that."""
        self.api.check(sampling)
        results: SimpleQueue[Any] = SimpleQueue()
        requests = group_requests(self._policy, prompts, group_size, sampling, seed)
        sampling_all = [
            self._fleet.dispatcher.sample(request, partial(_put, results, number * group_size))
            for number, request in enumerate(requests)
        ]
        running = self._submit(gather_or_cancel(sampling_all))
        running.add_done_callback(results.put)
        self._running.add(running)
        try:
            while (result := results.get()) is not running:
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
        return self._submit(coroutine).result()


def _put(results: SimpleQueue[Any], first_row: int, number: int, sample: Sample | str) -> None:
    results.put((first_row + number, sample))
