"""Models for a real Triton server that have TensorRT-LLM's tensors and our CPU engine's tokens.

The server runs each in a process of its own (its Python backend), which imports from here.
"""
