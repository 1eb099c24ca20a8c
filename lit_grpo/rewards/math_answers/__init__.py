"""Compare final answers to mathematics problems, exactly or with math-verify in workers."""
