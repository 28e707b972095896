"""kvtiers: a hierarchical KV cache for LLM serving whose books balance."""

__version__ = "0.1.0"
