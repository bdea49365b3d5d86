# SPDX-License-Identifier: Apache-2.0
"""Expected refusals of the faults in ``sampler_scenarios``; a module of its own, so that pytest imports no vLLM."""

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

FAULT_CAUSES = {
    "missing_half": f"'{FIRST}' is missing",
    "missing_module": "covers 'model.layers.0.self_attn.q_proj', but no tensor",
    "missing_slice": "covers 'model.layers.1.self_attn.k_proj', but no tensor",
    "unknown_module": "no linear module of the model takes the adapter of 'model.layers.7.",
    "twice": f"holds twice: '{FIRST}'",
    "wrong_shape": "shape (8, 127), the model needs (8, 128)",
    "wrong_rank": "shape (7, 128), the model needs (8, 128)",
    "nan": "not finite in 'model.layers.0.self_attn.q_proj.lora_A'",
    "integers": f"'{FIRST}' has dtype int32",
    "nothing": "holds no tensor",
    "flipped_byte": f"'{FIRST}' arrived damaged",
}

EXPERT = "model.layers.1.mlp.experts.3.up_proj"

EXPERT_FAULT_CAUSES = {
    "part_of_experts": "covers a part of the experts 'model.layers.0.mlp.experts' only",
    "missing_expert": f"covers '{EXPERT}', but no tensor",
    "missing_half": f"'base_model.model.{EXPERT}.lora_B.weight' is missing",
    "extra_expert": "no linear module of the model takes the adapter of 'model.layers.1.mlp.experts.4.up_proj'",
    "wrong_shape": f"'{EXPERT}.lora_B' has shape (23, 4), the model needs (24, 4)",
    "wrong_rank": f"'{EXPERT}.lora_A' has shape (3, 64), the model needs (4, 64)",
    "nan": f"not finite in '{EXPERT}.lora_A'",
    "base_missing_expert": f"no tensor reached: '{EXPERT}.weight'",
    "base_extra_expert": "'model.layers.1.mlp.experts.4.up_proj.weight' came twice or is no parameter",
    "base_wrong_shape": f"'{EXPERT}.weight' has shape (23, 64), the model needs (24, 64)",
}

MERGED_FAULT_CAUSES = {
    "missing": "sampler 0, transfer: parameters that no tensor reached: 'model.layers.1.self_attn.k_proj.weight'",
    "unknown": "sampler 0, transfer: tensor 'model.layers.7.self_attn.q_proj.weight' came twice or is no parameter",
    "adapter_name": "tensor 'base_model.model.model.layers.1.self_attn.q_proj.weight' came twice or is no parameter",
    "wrong_shape": "sampler 0, transfer: tensor 'model.layers.1.self_attn.q_proj.weight' has shape",
    "nan": "sampler 0, transfer: tensor 'model.layers.1.self_attn.q_proj.weight' holds a value that is not finite",
    "flipped_byte": "sampler 0, transfer: tensor 'model.layers.0.self_attn.",
    "wrong_version": "trainer, transfer: trainer rank 0 was asked to send policy version 41, but its weights are those",
}
