"""Final answers in text, compared exactly or by math-verify in worker processes."""
