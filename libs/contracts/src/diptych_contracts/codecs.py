"""How KV blocks may be encoded on their way. `raw` is what every worker takes."""

RAW = "raw"
LOSSLESS = "zstd"
"""The very bytes, their two halves compressed apart."""
INT8 = "int8"
FP8 = "fp8"
DELTA = "delta"
CODECS = (RAW, LOSSLESS, INT8, FP8, DELTA)
"""Every codec this build knows, in the order of what they lose: the first two nothing."""
LOSSY = frozenset({INT8, FP8, DELTA})
"""What comes back is near what was computed, and the answer may be another one."""
