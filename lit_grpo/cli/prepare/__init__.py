"""The command ``lit-grpo prepare``: training data by recipes."""
