"""The model of the embedded engine: forward pass, KV cache, sampling."""
