"""Check that the rollout engine and the teacher can be used: programs, servers, settings."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lit_grpo.cli.built_run import BuiltRun, NotChecked
from lit_grpo.cli.doctor.findings import Finding, failed, ok, remark
from lit_grpo.concurrency import EventLoopThread
from lit_grpo.rollout import HFEngine, Launch, VLLMEngine, VLLMServerEngine, VLLMTeacher
from lit_grpo.rollout.server.api_key import choose_key
from lit_grpo.rollout.server.endpoint import Endpoint, RequestRefused, ServerError
from lit_grpo.rollout.server.engine import ServedEngine
from lit_grpo.rollout.server.launching import check_program, choose_ports, installed_version
from lit_grpo.rollout.vllm.sampling import check_sampling, max_adapter_rank
from lit_grpo.rollout.vllm.server import VLLMAPI
from lit_grpo.rollout.weights.sync import sends_adapter

KEY = "model.engine.init_args"
ANSWER_SECONDS = 10.0
FITTING = "logprobs_mode {mode} fits the sampling parameters."


def check_engine(run: BuiltRun) -> Iterator[Finding]:
    """Check the engine with the settings of this run."""
    engine = run.module.engine
    engine.check_processes(run.trainer.world_size, run.trainer.num_nodes)
    if isinstance(engine, HFEngine):
        yield ok(
            f"HFEngine samples with the policy itself, up to {engine.max_concurrent} completions "
            "at a time."
        )
    elif isinstance(engine, VLLMEngine):
        yield from _in_process(engine, run)
    elif isinstance(engine, ServedEngine):
        engine.api.check_sampling(run.module.sampling)
        if engine.launch is None:
            yield from _running(engine, run)
        else:
            yield from _launched(engine, engine.launch, run)
        if isinstance(engine.api, VLLMAPI):
            yield ok(FITTING.format(mode=engine.api.logprobs_mode))
    else:
        yield ok(f"{type(engine).__name__} is not one of the engines that can be checked.")


def check_teacher(run: BuiltRun) -> Iterator[Finding]:
    """Check the servers of a teacher."""
    teacher = run.grpo.teacher if run.grpo else None
    if not isinstance(teacher, VLLMTeacher):
        return
    if run.is_offline:
        raise NotChecked(f"{', '.join(teacher.urls)} not asked (--offline).")
    key = choose_key(teacher.api_key_variable, is_launched=False, key="model.teacher")
    for url in teacher.urls:
        reply = _visit(url, key)
        if isinstance(reply, str):
            yield failed(
                f"the teacher's server {url} does not answer: {reply}.",
                "Start it with `vllm serve`, or set model.teacher.urls to its address.",
            )
        else:
            yield ok(f"The teacher's server {url} answers: {_describe(reply)}.")


def _in_process(engine: VLLMEngine, run: BuiltRun) -> Iterator[Finding]:
    check_sampling(run.module.sampling, engine.logprobs_mode)
    _check_rank(engine, run)
    version = installed_version(sys.executable, "vllm")
    if not version:
        yield failed(
            "vLLM is not installed in this environment.",
            "Install it with: pip install 'lit-grpo[vllm]', or set model.engine to HFEngine.",
        )
    else:
        yield ok(f"vLLM {version} in the trainer's process.")
    yield ok(FITTING.format(mode=engine.logprobs_mode))
    yield from _length(engine.max_model_len, f"{KEY}.max_model_len", run)


def _check_rank(engine: VLLMEngine | ServedEngine, run: BuiltRun) -> None:
    """Check that vLLM takes an adapter of this rank, if one is sent.

    Raises:
        UserError: it does not.
    """
    lora = run.module.policy.lora
    outline = run.outline.or_none()
    if lora is not None and outline is not None and sends_adapter(outline, engine.weight_sync):
        max_adapter_rank(lora.rank)


def _launched(engine: ServedEngine, launch: Launch, run: BuiltRun) -> Iterator[Finding]:
    """Check what a server is started with."""
    if engine.api.package == "vllm":
        _check_rank(engine, run)
    program, version = check_program(launch, engine.api.package)
    server = f"{engine.api.package} {version} of {program}" if version else program
    yield ok(f"The run starts {launch.num_servers} server(s) with {server}.")
    choose_ports(launch)
    yield from _length(launch.max_model_len, f"{KEY}.launch.max_model_len", run)


def _running(engine: ServedEngine, run: BuiltRun) -> Iterator[Finding]:
    """Ask servers that run already."""
    if run.is_offline:
        raise NotChecked(f"{', '.join(engine.urls)} not asked (--offline).")
    key = choose_key(engine.api_key_variable, is_launched=False)
    for url in engine.urls:
        reply = _visit(url, key, engine)
        if isinstance(reply, str):
            yield failed(
                f"{url} does not answer as a server of {type(engine).__name__}: {reply}. It needs "
                f"{engine.api.requirements}.",
                f"Start it, or set {KEY}.urls to its address.",
            )
            continue
        yield ok(f"{url} answers: {_describe(reply)}.")
        names = [model["id"] for model in reply["models"]]
        if isinstance(engine, VLLMServerEngine) and names and "policy" not in names:
            yield failed(
                f"{url} serves {', '.join(names)}, but the run asks for a model called policy.",
                "Start it with --served-model-name policy.",
            )
        if isinstance(engine.api, VLLMAPI):
            yield _reported(url, reply["mode"], engine.api.logprobs_mode)
        for model in reply["models"]:
            yield from _length(model.get("max_model_len"), f"--max-model-len of {url}", run)


def _reported(url: str, mode: str, expected: str) -> Finding:
    """Compare the logprobs that a server reports with what the run expects."""
    if not mode:
        return remark(
            f"{url} samples no token for the model called policy, so which logprobs it reports is "
            "not known."
        )
    if mode != expected:
        return failed(
            f"{url} reports {mode}, but the run expects {expected}: training would compare wrong "
            "probabilities.",
            f"Start it with --logprobs-mode {expected}, or set {KEY}.logprobs_mode.",
        )
    return ok(f"{url} reports {mode}, as its sampled tokens show.")


def _length(limit: int | None, setting: str, run: BuiltRun) -> Iterator[Finding]:
    """Yield a failure if an engine takes fewer tokens than a prompt and a completion have."""
    longest = run.prompt_lengths[0] + run.module.sampling.max_tokens
    if limit is not None and run.prompts and longest > limit:
        yield failed(
            f"the engine takes {limit:,} tokens of prompt and completion together, but the longest "
            f"have {longest:,}.",
            f"Raise {setting}, or lower model.sampling.max_tokens or data.max_prompt_tokens.",
        )


def _visit(
    url: str, key: str | None, engine: ServedEngine | None = None
) -> Mapping[str, Any] | str:
    """Return what a server says about itself, or why it does not answer."""
    loop = EventLoopThread("doctor")
    try:
        return loop.run(_ask(url, key, engine))
    except (RequestRefused, ServerError) as error:
        return str(error)
    finally:
        loop.close()


async def _ask(url: str, key: str | None, engine: ServedEngine | None) -> Mapping[str, Any]:
    endpoint = Endpoint(url, ANSWER_SECONDS, key)
    try:
        weights, mode = None, ""
        if engine is None:
            await endpoint.call("GET", "/health", seconds=ANSWER_SECONDS)
        else:
            await engine.api.check_health(endpoint, ANSWER_SECONDS)
            weights = await engine.api.read_version(endpoint, ANSWER_SECONDS)
            if isinstance(engine.api, VLLMAPI):
                mode = await _mode(engine.api, endpoint)
        version = await _field(endpoint, ("/version", "/server_info"), "version")
        models = await _field(endpoint, ("/v1/models",), "data")
        known = [one for one in models or [] if isinstance(one, dict) and "id" in one]
        return {"weights": weights, "version": version, "models": known, "mode": mode}
    finally:
        await endpoint.close()


async def _mode(api: VLLMAPI, endpoint: Endpoint) -> str:
    """Return which logprobs a server reports; empty if it samples nothing."""
    with suppress(RequestRefused, ServerError, TimeoutError):
        return await asyncio.wait_for(api.read_logprobs_mode(endpoint), ANSWER_SECONDS)
    return ""


async def _field(endpoint: Endpoint, paths: Sequence[str], name: str) -> Any:
    """Return a field of the first of these replies that has it, or None."""
    for path in paths:
        with suppress(RequestRefused, ServerError):
            reply = await endpoint.call("GET", path, seconds=ANSWER_SECONDS)
            if isinstance(reply, dict) and reply.get(name):
                return reply[name]
    return None


def _describe(reply: Mapping[str, Any]) -> str:
    names = ", ".join(model["id"] for model in reply["models"])
    known = {
        "version": reply["version"],
        "model": names,
        "weights of policy version": reply["weights"],
    }
    told = [f"{name} {value}" for name, value in known.items() if value]
    return ", ".join(told) or "healthy"
