"""Boards, each number with its source."""

from diptych_costs.power import PowerProfile

H100_SXM = PowerProfile(
    name="h100-sxm",
    # Measured, CUDA context open at 1980 MHz (arXiv 2605.23918).
    idle_w=121.7,
    # Dense bf16 matrix products from 1,024 rows on: 690 of 700 W. Measured on an H200, which has
    # the same power limit (AIConfigurator operator tables, Apache-2.0).
    prefill_w=690.0,
    # Llama-3.1-8B, whole serving runs, batch 8 to 256 (ML.ENERGY). The point at batch 1 is the top
    # of the range measured for small batches of 4B models on an H200 (arXiv 2605.11999).
    decode_w=((1, 300.0), (8, 486.0), (32, 560.0), (128, 669.0), (256, 691.0)),
    # nvidia-smi.
    cap_min_w=200.0,
    cap_max_w=700.0,
    # 345 of 1980 MHz at 685 mV (nvidia-smi, H200); full voltage taken as 1.0 V: an assumption.
    clock_min_frac=345 / 1980,
    voltage_min_frac=0.685,
    # Both knees are assumptions: locking 1980 down to 780 MHz saved up to 32 % of decode energy for
    # less than 1 % of its throughput (arXiv 2605.11999), so decode's knee lies near 0.4.
    voltage_knee_frac=0.5,
    decode_knee_frac=0.4,
)
