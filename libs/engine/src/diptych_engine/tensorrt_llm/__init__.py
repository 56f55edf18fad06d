"""TensorRT-LLM: in this process through its LLM API, or behind `trtllm-serve` over HTTP."""
