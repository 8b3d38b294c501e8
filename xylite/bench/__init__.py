"""Load on a running server: data sets, a light client, and the report vLLM's users know."""
