"""Models that a Triton Inference Server serves, over gRPC (extra `triton`).

Two of TensorRT-LLM's: `tensorrt_llm` of the C++ backend, whose context and generation a prefill and
a decode worker can share (`inflight`), and that of the LLM API, which takes and gives text and can
only do both phases (`llmapi`). Which one it is the model's own configuration says (`served`).
"""
