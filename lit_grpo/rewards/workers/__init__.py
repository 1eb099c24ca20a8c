"""Worker processes that may hang or crash: the pool, and any sync reward run inside it."""
