"""The LoRA profiler: pictures in which a LoRA joins later and later, beside those that have it in every step."""
