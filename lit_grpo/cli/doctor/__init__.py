"""The command ``lit-grpo doctor``: check before a run what would otherwise stop it later."""
