"""How late a LoRA may join: pictures in which it joins later and later, beside those that have it in every step."""
