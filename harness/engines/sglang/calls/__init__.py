"""The production calls of sglang, by what serves them. Only imported where sglang is installed."""
