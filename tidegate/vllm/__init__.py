"""A vLLM server behind SGLang's protocol: `tidegate vllm`."""
