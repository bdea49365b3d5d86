"""What each fault of ``sampler_scenarios`` must be refused for; here, so that pytest need not import vLLM."""

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

FAULT_CAUSES = {
    "missing_half": f"'{FIRST}' is missing",
    "missing_module": "covers 'model.layers.0.self_attn.q_proj', but no tensor",
    "missing_slice": "covers 'model.layers.1.self_attn.k_proj', but no tensor",
    "unknown_module": "no linear module of the model takes the adapter of 'model.layers.7.",
    "twice": f"holds twice: '{FIRST}'",
    "wrong_shape": "shape (8, 127), the model needs (8, 128)",
    "wrong_rank": "shape (7, 128), the model needs (8, 128)",
    "nan": "q_proj.lora_A' holds a value that is not finite",
    "integers": f"'{FIRST}' has dtype int32",
    "nothing": "holds no tensor",
    "flipped_byte": f"'{FIRST}' arrived damaged",
}
