"""Serves vLLM behind SGLang's protocol: `tidegate vllm`."""
