def test_what_would_train_wrongly_is_refused_before_training():
    with pytest.raises(ValueError, match="Set trainer.precision"):
        refuse_unsupported(SimpleNamespace(strategy=SingleDeviceStrategy(), precision="16-mixed"))
    with pytest.raises(ValueError, match="Set trainer.strategy"):
        refuse_unsupported(SimpleNamespace(strategy=FSDPStrategy(), precision="32-true"))


def test_the_learning_rate_warms_up_and_follows_its_schedule():
    outputs = fit(make_module(lr_schedule="cosine", warmup_steps=2), max_steps=6)
    rates = [output["metrics"]["policy/lr"] for output in outputs]
    cosine = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert rates == pytest.approx([0.0, 0.5, *cosine])


def test_the_schedule_counts_the_steps_of_epochs_and_updates():
    module = make_module(lr_schedule="linear", update={"epochs": 2})
    outputs = fit(module, max_steps=-1, max_epochs=3)
    rates = [output["metrics"]["policy/lr"] for output in outputs]
    # Six optimizer steps; the metric is the mean over the two of a rollout step.
    assert rates == pytest.approx([(6 + 5) / 12, (4 + 3) / 12, (2 + 1) / 12])


def test_a_run_without_an_end_has_no_schedule():
    with pytest.raises(ValueError, match="Set trainer.max_steps"):
        fit(make_module(lr_schedule="cosine"), max_steps=-1, max_epochs=-1)


def test_an_evaluation_that_could_judge_nothing_has_no_older_accuracy():
    class DownLater(Reward):
        calls = 0

        def score(self, prompt, completion):
            self.calls += 1
            return 1.0 if self.calls <= len(PROMPTS) else None

    module = make_module()
    module.evaluation = Evaluation(accuracy=DownLater(weight=0.5), before_training=False)
    seen = []

    class Seen(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["val/accuracy"]))

    trainer = make_trainer(Seen(), max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, PromptLoader(PROMPTS, 4), PromptLoader(PROMPTS, 4, training=False))
    assert seen[0] == 1.0  # whatever the weight
    assert math.isnan(seen[1])


def test_a_checkpoint_of_an_adapter_leaves_its_base_out_and_restores(tmp_path):
    base = tmp_path / "base"
    start = Policy(architecture=LLAMA)
    start.load(with_reference=False)
    start.save_pretrained(base)
    policy = {"architecture": None, "path": str(base), "lora": LoRA(rank=4)}
    module = make_module(policy=policy)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, PromptLoader(PROMPTS, 4))
    path = tmp_path / "some.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved
    assert all("lora" in name for name in saved)
    again = make_module(policy=policy)
    second = make_trainer(max_steps=2)
    second.fit(again, PromptLoader(PROMPTS, 4), ckpt_path=path, weights_only=True)
    torch.testing.assert_close(weights(again), weights(module), rtol=0, atol=0)
    other = make_module(policy=policy | {"lora": LoRA(rank=4, target_modules=["lm_head"])})
    with pytest.raises(ValueError, match="it belongs to another policy"):
        second.fit(other, PromptLoader(PROMPTS, 4), ckpt_path=path, weights_only=True)


class DiesAtAnEvaluation(HFEngine):
    def generate(self, prompts, group_size, sampling, *, seed):
        if group_size == 1:
            raise EngineFailed("no server is left")
        yield from super().generate(prompts, group_size, sampling, seed=seed)


def test_an_engine_that_gives_up_at_an_evaluation_ends_the_run_with_its_checkpoint(tmp_path):
    trainer, outputs = fit(DiesAtAnEvaluation(), ExitCheckpoint(str(tmp_path)))
    reason = get_stop_reason(trainer)
    assert reason.exit_code == 5
    assert reason.message == "Stopped at an evaluation: no server is left"
    assert len(outputs) == trainer.global_step == 1
    assert (tmp_path / "last.ckpt").exists()


def test_an_engine_that_gives_up_before_training_is_an_error():
    module = make_module(engine=DiesAtAnEvaluation())
    module.evaluation.before_training = True
    with pytest.raises(EngineFailed, match="no server is left"):
        make_trainer(num_sanity_val_steps=0).fit(
            module, PromptLoader(PROMPTS, 4), PromptLoader(PROMPTS, 4, training=False)
        )


def test_an_engine_that_gives_up_in_a_validation_of_its_own_is_an_error():
    with pytest.raises(EngineFailed, match="no server is left"):
        make_trainer().validate(
            make_module(engine=DiesAtAnEvaluation()), PromptLoader(PROMPTS, 4, training=False)
        )
