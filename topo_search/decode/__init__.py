"""The tree decoder: cache, buffers, one step, start-up probe."""
