"""Names of the fixtures in tests/data."""

from __future__ import annotations

ROPES = ["arch/llama", "arch/llama_rope_linear", "arch/llama_rope_llama3", "arch/llama_rope_yarn"]
FAMILIES = ["arch/qwen2", "arch/smollm3", "arch/ernie4_5", "arch/phi3"]
EXPERTS = ["arch/phimoe", "arch/minimax_m2", "arch/deepseek_v3_narrow"]
"""Without a tokenizer: these cannot be served."""

GGUF = [f"gguf/tiny-llama-{kind}.gguf" for kind in ("f16_bf16", "q8_0", "q4_0", "q4_1")]
SERVED = ROPES + FAMILIES + GGUF
ALL = SERVED + EXPERTS
