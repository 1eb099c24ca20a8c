"""Use vLLM in this process, and write the results as JSON for `test_in_process_with_vllm`.

This is a program for the environment that has vLLM; one run serves many tests.
"""

import gc
import json
import os
import random
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from tiny import prompt, tiny_policy
from vllm_settings import ARCHITECTURE, FLAGS, MAX_MODEL_LEN

from lit_grpo.policy import LoRA
from lit_grpo.rollout import EngineFailed, Sampling, VLLMEngine, WeightCheck

PROMPTS = [prompt("12+34=", id="a"), prompt("a longer prompt", id="b"), prompt("x", id="c")]
GROUP_SIZE = 3
PLAIN = Sampling(max_tokens=12)
GREEDY = replace(PLAIN, temperature=0.0)


def open_engine(policy, **settings):
    settings = {"weight_check": WeightCheck(every=1)} | settings
    gc.freeze()  # vLLM collects garbage some times per start, and need not look at its modules
    engine = VLLMEngine(max_model_len=MAX_MODEL_LEN, flags=FLAGS, **settings)
    engine.start(policy)
    return engine


def move(policy, amount=0.05):
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += amount * torch.randn_like(parameter)


def generate(engine, sampling=PLAIN, *, prompts=PROMPTS, group_size=GROUP_SIZE, seed=0):
    rows = dict(engine.generate(prompts, group_size, sampling, seed=seed))
    return [rows[n] for n in range(len(prompts) * group_size)]


def plain(completions):
    return [asdict(completion) for completion in completions]


def trainer_logprobs(policy, completions, temperature, prompts=PROMPTS, group_size=GROUP_SIZE):
    """Return those of the policy itself, row by row, without a cache."""
    rows = []
    for n, completion in enumerate(completions):
        tokens = prompts[n // group_size].token_ids + completion.token_ids
        with torch.no_grad():
            logits = policy.model(torch.tensor([tokens])).logits[0, :-1] / temperature
        own = logits.log_softmax(-1)[-len(completion.token_ids) :]
        rows.append(own.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist())
    return rows


def sampled(engine, policy, sampling, temperature=1.0, **options):
    completions = generate(engine, sampling, **options)
    trainer = trainer_logprobs(policy, completions, temperature)
    return {"completions": plain(completions), "trainer_logprobs": trainer}


def failure(function, *arguments):
    """Return the error that it raises, if any."""
    try:
        function(*arguments)
    except (EngineFailed, ValueError) as error:
        return {"type": type(error).__name__, "message": str(error)}
    return None


def draws():
    """Draw numbers from every global generator that a training run uses."""
    return [random.random(), float(np.random.rand()), torch.rand(2).tolist()]


def shared_state():
    return {
        "environment": dict(os.environ),
        "has_process_group": torch.distributed.is_initialized(),
        "num_threads": torch.get_num_threads(),
        "excepthook": repr(sys.excepthook),
        "set_num_threads": repr(torch.set_num_threads),
    }


def seed_all():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def check_process(policy):
    """Compare random numbers and process state with and without an engine."""
    seed_all()
    undisturbed = [draws() for _ in range(6)]
    state = shared_state()
    seed_all()
    disturbed, states = [draws()], []
    engine = open_engine(policy)
    disturbed.append(draws())
    engine.load_weights(policy, 0)
    disturbed.append(draws())
    rows = engine.generate(PROMPTS, GROUP_SIZE, PLAIN, seed=0)
    next(rows)
    disturbed.append(draws())
    states.append(shared_state())
    list(rows)
    disturbed.append(draws())
    states.append(shared_state())
    engine.close()
    disturbed.append(draws())
    states.append(shared_state())
    return {"undisturbed": undisturbed, "disturbed": disturbed, "before": state, "after": states}


def check_sampling(engine, policy):
    full = generate(engine)
    stop = full[0].token_ids[3]
    texts = [completion.text for completion in full]
    pair = next(
        text[i : i + 2]
        for text in texts
        for i in range(2, len(text) - 2)
        if text[i : i + 2].isascii() and text[i : i + 2].isprintable()
    )
    every_token = tuple(range(250))
    hot = [generate(engine, replace(PLAIN, temperature=0.7), seed=seed) for seed in (1, 1, 2)]
    greedy = generate(engine, GREEDY, group_size=1)
    return {
        "full": plain(full),
        "greedy": plain(greedy),
        "greedy_by_transformers": [by_transformers(policy, one) for one in PROMPTS],
        "greedy_trainer_logprobs": trainer_logprobs(policy, greedy, 1.0, group_size=1),
        "temperature_0.7": sampled(engine, policy, replace(PLAIN, temperature=0.7), 0.7),
        "seeds": [plain(completions) for completions in hot],
        "stop_token": stop,
        "stopped_by_token": plain(generate(engine, replace(PLAIN, stop_token_ids=(stop,)))),
        "stop_string": pair,
        "stopped_by_string": plain(generate(engine, replace(PLAIN, stop=(pair,)))),
        "min_tokens": plain(
            generate(engine, replace(PLAIN, stop_token_ids=every_token, min_tokens=5))
        ),
        "top_p": failure(generate, engine, replace(PLAIN, top_p=0.9)),
        "with_one_too_long": plain(
            generate(engine, prompts=[prompt("x" * 400, id="long"), PROMPTS[1]])
        ),
    }


def by_transformers(policy, one):
    tokens = policy.model.generate(
        torch.tensor([one.token_ids]), max_new_tokens=PLAIN.max_tokens, do_sample=False
    )
    return tokens[0, len(one.token_ids) :].tolist()


def check_abort(engine):
    expected = generate(engine)
    llm = engine._vllm._llm
    stop = expected[0].token_ids[0]
    mixed = replace(PLAIN, max_tokens=200, stop_token_ids=(stop,))
    with closing(engine.generate(PROMPTS, GROUP_SIZE, mixed, seed=0)) as rows:
        first = next(rows)
        num_unfinished_tokens = engine.num_unfinished_tokens
        was_running = llm.llm_engine.has_unfinished_requests()
    is_running = llm.llm_engine.has_unfinished_requests()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return {
        "first": {"row": first[0], "num_tokens": len(first[1].token_ids)},
        "num_unfinished_tokens": [num_unfinished_tokens, engine.num_unfinished_tokens],
        "was_running": was_running,
        "is_running": is_running or scheduler.has_unfinished_requests(),
        "next_is_the_same": generate(engine) == expected,
    }


def check_full_updates(engine, policy):
    results = {}
    first = generate(engine, GREEDY)
    move(policy)
    engine.load_weights(policy, engine.version)
    results["same_version"] = generate(engine, GREEDY) == first
    engine.load_weights(policy, 7)
    results["new_version"] = sampled(engine, policy, GREEDY)
    results["differences"] = list(engine.observe().means["sampler/weight_check_difference"])
    results["asleep"] = check_sleep(engine, policy)
    results["health"] = engine.health()
    return results


def check_skipped_reset(engine, policy):
    engine.load_weights(policy, engine.version + 1)  # its check fills the cache
    engine._vllm._llm.reset_prefix_cache = lambda **options: True
    move(policy, 0.2)
    problem = failure(engine.load_weights, policy, engine.version + 1)
    return {"failure": problem, "health": engine.health()}


def check_tied_embeddings():
    policy = tiny_policy(architecture=ARCHITECTURE | {"tie_word_embeddings": True})
    engine = open_engine(policy, weight_check=WeightCheck())
    engine.load_weights(policy, 0)
    differences = list(engine.observe().means["sampler/weight_check_difference"])
    move(policy)
    problem = failure(engine.load_weights, policy, 1)
    engine.close()
    return {"failure": problem, "differences_before": differences}


def check_adapter(weight_sync):
    policy = tiny_policy(architecture=ARCHITECTURE, lora=LoRA(rank=4))
    engine = open_engine(policy, weight_sync=weight_sync)
    differences, loaded = [], []
    for version in (0, 1, 2):
        move(policy)
        engine.load_weights(policy, version)
        differences += engine.observe().means["sampler/weight_check_difference"]
        if weight_sync != "full":
            loaded.append(sorted(engine._vllm._llm.llm_engine.list_loras()))
    result = sampled(engine, policy, PLAIN)
    scratch = engine._scratch.path
    directories = sorted(path.name for path in scratch.glob("adapter-*"))
    asleep = check_sleep(engine, policy)
    engine.close()
    return {
        "differences": differences,
        "loaded": loaded,
        "directories": directories,
        "is_scratch_gone": not scratch.exists(),
        "sampled": result,
        "asleep": asleep,
    }


def check_sleep(engine, policy):
    """Generate twice at each of two versions, with an engine that sleeps in between."""
    engine._vllm._sleeps, sent = True, []
    send, engine._send_weights = engine._send_weights, lambda: (sent.append(1), send())
    was_asleep, rows, differences = [], [], []
    for _ in range(2):
        move(policy)
        engine.load_weights(policy, engine.version + 1)
        differences += engine.observe().means["sampler/weight_check_difference"]
        for _ in range(2):
            rows.append(generate(engine, GREEDY))
            was_asleep.append(engine._vllm._llm.llm_engine.is_sleeping())
    engine._vllm._sleeps = False
    return {
        "was_asleep": was_asleep,
        "is_repeated": rows[0] == rows[1] != rows[2] == rows[3],
        "weights_sent": len(sent),
        "differences": differences,
    }


def check_raw_logprobs(policy):
    engine = open_engine(policy, logprobs_mode="raw_logprobs")
    engine.load_weights(policy, 0)
    result = {
        "top_p": sampled(engine, policy, replace(PLAIN, top_p=0.5, top_k=3)),
        "other_temperature": failure(generate, engine, replace(PLAIN, temperature=0.7)),
    }
    engine.close()
    return result


def check_process_group(policy):
    hook, store = sys.excepthook, torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    engine = VLLMEngine()
    problem = failure(engine.start, policy)
    torch.distributed.destroy_process_group()
    sys.excepthook = hook  # init_process_group has replaced it
    return problem


def main() -> None:
    gc.disable()  # nothing that is imported becomes garbage
    policy = tiny_policy(architecture=ARCHITECTURE)
    results = {"process": check_process(policy), "process_group": check_process_group(policy)}
    engine = open_engine(policy)
    engine.load_weights(policy, 3)
    results["sampling"] = check_sampling(engine, policy)
    results["aborted"] = check_abort(engine)
    results["full"] = check_full_updates(engine, policy)
    results["skipped_reset"] = check_skipped_reset(engine, policy)
    engine.close()
    engine.close()
    results["tied"] = check_tied_embeddings()
    results["adapter"] = check_adapter("auto")
    results["merged"] = check_adapter("full")
    results["raw"] = check_raw_logprobs(policy)
    results["children"] = [child.name() for child in psutil.Process().children(recursive=True)]
    results["shared_state_at_the_end"] = shared_state()
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
